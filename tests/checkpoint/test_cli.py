"""The ``accelight`` command: what it prints, how it ends, and that it never imports torch."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelight.checkpoint.cli import main
from tests.checkpoint import damage, saving
from tests.checkpoint.saving import save
from tests.checkpoint.without_torch import WITHOUT_TORCH
from tests.ranks import run_on_ranks

COMMAND = [sys.executable, "-m", "accelight.checkpoint"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return damage.good(tmp_path / "in")


def test_one_line_at_the_end(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", str(folder), str(tmp_path / "out")]) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith("2 tensors, ")
    assert captured.out.endswith(f" -> {tmp_path / 'out' / 'model.safetensors'}\n")
    assert captured.out.count("\n") == 1
    assert captured.err == ""


def test_every_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = {f"net.w{i}": torch.randn(10) for i in range(6)} | {"loss.x": torch.ones(2)}
    save(tmp_path / "in", {"model": state})
    options = "--max-shard-size 60 --dtype bf16 --strip-prefix net --include w* --include v* --exclude w5 --exclude w4"
    status = main(
        [
            "merge-weights",
            str(tmp_path / "in"),
            str(tmp_path / "out"),
            *options.split(),
            "--verify",
            "--threads",
            "2",
            "--json",
        ]
    )
    assert status == 0
    report = json.loads(capfd.readouterr().out)
    assert report["num_tensors"] == 4
    assert report["verified"]
    assert report["destination"] == str(tmp_path / "out")
    assert set(report["skipped"]) == {"model.net.w4", "model.net.w5", "model.loss.x"}
    merged: dict[str, torch.Tensor] = {}
    for name in report["files"][:-1]:
        merged |= load_file(tmp_path / "out" / name)
    assert all(torch.equal(merged[f"w{i}"], state[f"net.w{i}"].bfloat16()) for i in range(4))


@pytest.mark.parametrize(
    "options",
    [["--unsafe-serialization", "--remove-checkpoint-dir"], ["--unsafe_serialization", "--remove_checkpoint_dir"]],
)
def test_accelerates_spelling(folder: Path, tmp_path: Path, options: list[str]) -> None:
    assert main(["merge-weights", str(folder), str(tmp_path / "out"), *options]) == 0
    assert os.listdir(tmp_path / "out") == ["pytorch_model.bin"]
    assert not folder.exists()


def test_max_shard_size_with_an_underscore(folder: Path, tmp_path: Path) -> None:
    options = ["--max_shard_size", "48", "--strip_prefix", "auto"]
    assert main(["merge-weights", str(folder), str(tmp_path / "out"), *options]) == 1  # no attribute: 'a' and 'b'
    assert main(["merge-weights", str(folder), str(tmp_path / "out"), *options[:2]]) == 0
    assert len(os.listdir(tmp_path / "out")) == 3


def test_quiet_prints_errors_alone(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", str(folder), str(tmp_path / "out"), "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")


def test_what_is_left_out_is_listed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "in", {"model": {"w": torch.ones(2)}, "extra": {str(i): i for i in range(12)}})
    assert main(["merge-weights", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert capfd.readouterr().err == "  left out, not a tensor: 12 (extra.0, extra.1, extra.2, ...)\n"


# --- how it ends


def test_a_bad_checkpoint_is_one_line_and_status_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/.metadata").write_bytes(b"cos\nsystem\n.")
    assert main(["merge-weights", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    captured = capfd.readouterr()
    assert captured.err.startswith("accelight: error: ")
    assert "os.system" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "merge-weights", str(tmp_path), "out", "--debug"], check=False, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_the_systems_no_is_status_1(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", str(folder), "/proc/merged"]) == 1
    assert "/proc" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["merge"], "invalid choice"),
        (["merge-weights"], "the following arguments are required: CKPT, OUT"),
        (
            ["merge-weights", "a", "b", "--max-shard-size", "5XB"],
            "A size must be a number of bytes or a string like '5GB'",
        ),
        (["merge-weights", "a", "b", "--dtype", "int8"], "dtype must be one of"),
        (["merge-weights", "a", "b", "--threads", "x"], "invalid int value: 'x'"),
        (["merge-weights", "a", "b", "--remove"], "unrecognized arguments: --remove"),
    ],
)
def test_usage_is_status_2(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("options", [["--threads", "0"], ["--strip-prefix", "."], ["--include", ""]])
def test_usage_that_the_merge_finds_is_status_2(folder: Path, tmp_path: Path, options: list[str]) -> None:
    assert main(["merge-weights", str(folder), str(tmp_path / "out"), *options]) == 2


def test_a_stores_missing_package_is_status_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "oss://bucket/saved.ckpt"]) == 1
    assert "Install ossfs" in capfd.readouterr().err


def test_an_output_inside_what_is_removed_is_status_2(folder: Path) -> None:
    assert main(["merge-weights", str(folder), str(folder / "out"), "--remove-checkpoint-dir"]) == 2


def test_interrupted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelight.checkpoint.merge as merge

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merge, "merge_fsdp_weights", interrupt)
    assert main(["merge-weights", str(folder), str(tmp_path / "out")]) == 130


TERMINATED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as below nohup and `&`
if sys.argv.pop() == "hidden name":
    del os.O_TMPFILE
from accelight.checkpoint import cli, merge
merge.Progress.add = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(cli.main())
"""


@pytest.mark.parametrize("way", ["without a name", "hidden name"])
def test_a_terminated_merge_leaves_nothing(folder: Path, tmp_path: Path, way: str) -> None:
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", TERMINATED, "merge-weights", str(folder), str(tmp_path / "out"), way]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (143, "")
    assert ended.stderr == "accelight: error: terminated\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_the_handler_of_sigterm_is_put_back(folder: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["merge-weights", str(folder), str(tmp_path / "out")]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_version_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capfd.readouterr().out.startswith("accelight ")


def test_garbage_collection_is_as_before(folder: Path, tmp_path: Path) -> None:
    import gc

    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        main(["merge-weights", str(folder), str(tmp_path / "out")])
        assert gc.isenabled() is enabled
    gc.enable()


# --- as a process


def test_the_installed_command(folder: Path, tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("accelight")
    subprocess.run([command, "merge-weights", folder, tmp_path / "out"], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "out/model.safetensors").is_file()


def test_torch_is_never_imported(tmp_path: Path) -> None:
    """Rows and columns, several files, ties, names: all but what says it needs torch."""
    run_on_ranks(2, saving.save_layouts, str(tmp_path / "in"), (2,))
    command = [sys.executable, "-c", WITHOUT_TORCH, "merge-weights", str(tmp_path / "in")]
    for number, options in enumerate([[], ["--verify"], ["--max-shard-size", "1KB"], ["--remove-checkpoint-dir"]]):
        subprocess.run([*command, str(tmp_path / f"out{number}"), *options], check=True, stdout=subprocess.DEVNULL)


def test_help_and_errors_import_little() -> None:
    code = (
        "import sys; from accelight.checkpoint.cli import main\n"
        "try: main(['merge-weights', '--help'])\n"
        "except SystemExit: pass\n"
        "main(['merge-weights', 'no such folder', 'out'])\n"
        "assert not {'torch', 'numpy', 'rich', 'asyncio', 'importlib.metadata', 'unittest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """On a real terminal stderr shows a bar, and stdout the one line."""
    damage.good(tmp_path / "in", a=torch.zeros(64))
    code = (
        "import sys, accelight.checkpoint.merge as p; p._DELAY_S = p._INTERVAL_S = 0.0\n"
        "from accelight.checkpoint.cli import main\n"
        f"sys.exit(main(['merge-weights', {str(tmp_path / 'in')!r}, {str(tmp_path / 'out')!r}, '--threads', '1']))"
    )
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    result = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True, text=True
    )
    os.close(terminal)
    shown = os.read(controller, 65536).decode()
    os.close(controller)
    assert "merging" in shown
    assert result.stdout.startswith("1 tensors")


def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    """``accelight inspect ... | head``: no word of a broken pipe."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        command = [sys.executable, "-m", "accelight", "inspect", str(folder)]
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 128 + signal.SIGPIPE
    assert not ended.stderr
