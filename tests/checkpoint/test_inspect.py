"""``inspect_checkpoint`` and ``accelight inspect``: folders of everyone who saves them, and damaged ones."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelight.checkpoint import CheckpointError, inspect_checkpoint, write_manifest
from accelight.checkpoint.cli import main
from tests.checkpoint import damage, saving
from tests.checkpoint.bombs import BOMBS
from tests.checkpoint.hostile import NAMES, hostile
from tests.checkpoint.saving import save
from tests.checkpoint.without_torch import WITHOUT_TORCH
from tests.ranks import run_on_ranks

INSPECT = """
import resource, sys
from accelight.checkpoint import inspect_checkpoint
resource.setrlimit(resource.RLIMIT_AS, (600 * 2**20,) * 2)
print(inspect_checkpoint(sys.argv[1]))
"""
META_BOMBS = {name: pickled for name, pickled in BOMBS.items() if len(pickled) < 2**20 or name == "equal hashes"}
META_BOMBS |= {"empty dicts": BOMBS["empty dicts"][: 2**20] + b"."}


def expected_totals() -> tuple[int, int, int]:
    state = saving.full_state_dict()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return len(state), sum(tensor.numel() for tensor in state.values()), num_bytes


@pytest.mark.parametrize(("engine", "prefix"), [("fsdp1", "model"), ("fsdp2", "state_dict")])
def test_a_folder_of_two_processes(tmp_path: Path, engine: str, prefix: str) -> None:
    run_on_ranks(2, saving.save_engine, str(tmp_path), engine, False, True)
    info = inspect_checkpoint(tmp_path)
    assert (info.kind, info.model_prefix, info.has_optimizer) == ("torch-dcp", prefix, True)
    assert (len(info.tensors), info.num_parameters, info.num_bytes) == expected_totals()
    assert info.dtypes == {"float32": len(info.tensors) - 2, "int64": 2}
    assert {file.name: file.num_bytes for file in info.files} == {
        path.name: path.stat().st_size for path in tmp_path.glob("*.distcp")
    }
    assert info.num_chunks > len(info.tensors)
    assert "optimizer state" in info.skipped.values()
    assert {tensor.name: tensor.shape for tensor in info.tensors} == {
        name: tuple(tensor.shape) for name, tensor in saving.full_state_dict().items()
    }


def test_accelerates_folder(tmp_path: Path) -> None:
    run_on_ranks(2, saving.save_accelerate, str(tmp_path), 2)
    info = inspect_checkpoint(tmp_path)
    assert info.path == tmp_path / "pytorch_model_fsdp_0"
    assert (info.kind, info.model_prefix, info.has_optimizer) == ("accelerate", "model", True)
    assert (len(info.tensors), info.num_parameters, info.num_bytes) == expected_totals()


def test_lightnings_fsdp_folder(tmp_path: Path) -> None:
    run_on_ranks(2, saving.save_lightning_fsdp, str(tmp_path))
    info = inspect_checkpoint(tmp_path)
    assert (info.kind, info.model_prefix, info.has_optimizer) == ("lightning-fsdp", "model", True)
    assert (info.epoch, info.global_step, info.notes) == (3, None, ())


def test_lightnings_model_parallel_folder(tmp_path: Path) -> None:
    run_on_ranks(2, saving.save_lightning_model_parallel, str(tmp_path))
    info = inspect_checkpoint(tmp_path)
    assert (info.kind, info.model_prefix, info.has_optimizer) == ("lightning-model-parallel", "state_dict", True)
    assert info.epoch == 3


def test_fabrics_folder(tmp_path: Path) -> None:
    save(tmp_path, {"net": {"w": torch.ones(2)}})
    torch.save({"step": 1}, tmp_path / "meta.pt")
    info = inspect_checkpoint(tmp_path)
    assert (info.kind, info.model_prefix, info.has_optimizer) == ("lightning", "net", False)


def test_inspect_shows_the_manifest(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"net.w": torch.ones(2, dtype=torch.bfloat16)}, "extra": {"n": 1}})
    write_manifest(tmp_path, model_prefix="model", ties={"net.head": "net.w"}, module_attribute="net")
    info = inspect_checkpoint(tmp_path)
    assert (info.kind, info.ties, info.module_attribute) == ("accelight", {"net.head": "net.w"}, "net")
    assert info.skipped == {"extra.n": "not a tensor"}


def test_an_optimizer_beside_weights_at_the_top(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2), "optimizer": {"lr": 0.1}})
    assert inspect_checkpoint(tmp_path).has_optimizer
    assert inspect_checkpoint(tmp_path).model_prefix == ""


# --- meta.pt


class Strange(collections.OrderedDict[str, Any]):
    """Fails where somebody makes one."""

    def __setstate__(self, state: object) -> None:
        raise AssertionError("ran")

    def __reduce__(self) -> Any:
        return (Strange, (), {"a": 1}, iter([1, 2]), iter([("k", "v")]))


def test_epoch_and_step_beside_objects_that_are_not_made(tmp_path: Path) -> None:
    damage.good(tmp_path)
    content = {
        "hyper_parameters": Strange(),
        "callbacks": {"best": torch.ones(3), "where": tmp_path, "seen": {1, 2}, "dtype": torch.bfloat16},
        "loops": collections.OrderedDict(a=1),
        "epoch": 7,
        "global_step": 1234,
    }
    torch.save(content, tmp_path / "meta.pt")
    info = inspect_checkpoint(tmp_path)
    assert (info.epoch, info.global_step, info.notes) == (7, 1234, ())


def test_what_is_no_number_is_not_taken(tmp_path: Path) -> None:
    damage.good(tmp_path)
    torch.save({"epoch": "7", "global_step": True}, tmp_path / "meta.pt")
    info = inspect_checkpoint(tmp_path)
    assert (info.epoch, info.global_step) == (None, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no zip", "not a file of torch.save"), (damage.torch_record([1]), "expected a dict, found list")],
)
def test_a_meta_file_that_is_none_is_a_note(tmp_path: Path, content: bytes, message: str) -> None:
    damage.good(tmp_path)
    (tmp_path / "meta.pt").write_bytes(content)
    info = inspect_checkpoint(tmp_path)
    assert info.epoch is None
    assert message in info.notes[0]
    assert message in str(info)


def test_a_compressed_meta_file_is_a_note(tmp_path: Path) -> None:
    import zipfile

    damage.good(tmp_path)
    (tmp_path / "meta.pt").write_bytes(damage.rebuild(damage.torch_record({"epoch": 1}), zipfile.ZIP_DEFLATED))
    assert "is compressed" in inspect_checkpoint(tmp_path).notes[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_meta_file_is_harmless(tmp_path: Path, name: str) -> None:
    """Objects in it are neither made nor called; what cannot be read is a note, and the rest is told."""
    damage.good(tmp_path / "in")
    marker = tmp_path / "marker"
    pickled = hostile(f"touch {marker}".encode())[name]
    (tmp_path / "in/meta.pt").write_bytes(damage.rebuild(damage.torch_record({"epoch": 1}), data_pkl=pickled))
    info = inspect_checkpoint(tmp_path / "in")
    assert (info.epoch, info.global_step, len(info.tensors)) == (None, None, 2)
    assert (not info.notes) if name == "a wrong object" else ("meta.pt" in info.notes[0])  # that is a plain dict
    assert not marker.exists()


@pytest.mark.parametrize("name", META_BOMBS)
def test_a_meta_file_that_is_a_bomb(tmp_path: Path, name: str) -> None:
    damage.good(tmp_path / "in")
    record = damage.rebuild(damage.torch_record({"epoch": 1}), data_pkl=META_BOMBS[name])
    (tmp_path / "in/meta.pt").write_bytes(record)
    command = [sys.executable, "-c", INSPECT, str(tmp_path / "in")]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    assert len(told) < 2000, told[:2000]
    assert "model.b" not in told
    assert "2 tensors" in told


def test_a_meta_file_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    torch.save({"epoch": 5}, tmp_path / "elsewhere.pt")
    damage.good(tmp_path / "in")
    (tmp_path / "in/meta.pt").symlink_to(tmp_path / "elsewhere.pt")
    info = inspect_checkpoint(tmp_path / "in")
    assert info.epoch is None
    assert "a link out of the checkpoint's folder" in info.notes[0]


# --- damaged folders


def test_a_missing_file(tmp_path: Path) -> None:
    damage.good(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"needs the file '__0_0.distcp', not found"):
        inspect_checkpoint(tmp_path)


def test_a_file_cut_off(tmp_path: Path) -> None:
    damage.good(tmp_path)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"tensor 'model.\w': the record should end at byte \d+, but the file has"
    ):
        inspect_checkpoint(tmp_path)


# --- the command


def test_inspect_prints_a_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = damage.good(tmp_path / "in", a=torch.zeros(3, 4), b=torch.ones(5, dtype=torch.bfloat16))
    torch.save({"epoch": 2, "global_step": 40}, folder / "meta.pt")
    write_manifest(folder, model_prefix="model", ties={"c": "a"}, module_attribute="")
    assert main(["inspect", str(folder), "--tensors"]) == 0
    size = (folder / "__0_0.distcp").stat().st_size
    assert capfd.readouterr().out.splitlines() == [
        f"checkpoint   {folder}",
        "kind         accelight (torch.distributed.checkpoint with accelight.json)",
        "model under  model",
        "tensors      2 tensors in 2 chunks",
        "parameters   17",
        "size         58 B (58 bytes)",
        "dtypes       float32 (1), bfloat16 (1)",
        "optimizer    no",
        "trained      epoch 2, step 40",
        "attribute    (none: the module holds layers itself)",
        "tied         c -> a",
        f"file         __0_0.distcp  {size / 1000:.1f} kB  2 chunks",
        "digests      none: changes since the save may go unnoticed",
        "",
        "a  float32   [3, 4]  48 B  1 chunk",
        "b  bfloat16  [5]     10 B  1 chunk",
    ]


def test_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = damage.good(tmp_path / "in")
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["path"] == str(folder)
    assert (told["num_tensors"], told["num_parameters"], told["num_bytes"]) == (2, 17, 68)
    assert told["dtypes"] == {"float32": 2}
    assert told["tensors"][0]["shape"] == [3, 4]


def test_exit_statuses_of_inspect(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert capfd.readouterr().err.startswith("accelight: error: ")
    with pytest.raises(SystemExit) as ended:
        main(["inspect"])
    assert ended.value.code == 2


def test_torch_is_never_imported(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    torch.save({"epoch": 2, "best": torch.ones(2)}, folder / "meta.pt")
    command = [sys.executable, "-c", WITHOUT_TORCH, "inspect", str(folder), "--tensors"]
    assert "epoch 2" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
