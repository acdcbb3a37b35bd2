"""Notebooks: the tour in a Jupyter kernel, `notebook_launcher`, and what errors there say."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch.multiprocessing.spawn import ProcessRaisedException

from accelight.state import PartialState
from accelight.strategies import notebook_launcher
from accelight.strategies.common.launch import SubprocessScriptLauncher, check_devices
from tests.ranks import run_on_ranks
from tests.scripts import environment_without_launchers, run_script
from tests.slowness import slowness

ROOT = Path(__file__).parents[2]


def _execute(notebook: Any, folder: Path) -> Any:
    """Execute a notebook's cells in a kernel, up to the end although some fail."""
    from nbclient import NotebookClient

    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=int(120 * slowness()), resources=place, allow_errors=True)
    client.execute(env=environment_without_launchers())
    return notebook


def _printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def _errors(cell: Any) -> list[str]:
    return [f"{output.ename}: {output.evalue}" for output in cell.outputs if output.output_type == "error"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 2])
def test_the_tour_runs_in_a_notebook(devices: int, tmp_path: Path) -> None:
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    assert [cell.source for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []
    [choice] = [cell for cell in notebook.cells if cell.source.startswith("DEVICES = 1\n")]
    choice.source = choice.source.replace("DEVICES = 1", f"DEVICES = {devices}")
    _execute(notebook, tmp_path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [error for cell in code for error in _errors(cell)] == []
    printed = "".join(map(_printed, code))
    parts = " ".join(f"__{rank}_0.distcp" for rank in range(devices))
    assert [line.rstrip() for line in printed.splitlines()] == [
        f"{devices} process(es), head (128, 128), here ({128 // devices}, 128)",
        f".metadata {parts} accelight.json meta.pt",
        "13 tensors in model.safetensors",
        "peter piper picked a peck of pickled peppers;",
    ]


SETUP = """
import os, socket, torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from accelight.state import PartialState
from accelight.strategies import AccelFSDPStrategy, notebook_launcher

def fit(devices):
    trainer = Trainer(strategy=AccelFSDPStrategy(fsdp_version=2), accelerator="cpu", devices=devices, max_steps=2,
                      logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(BoringModel())
    PartialState().print(PartialState().num_processes, trainer.global_step)
"""
TAKE_PORT = """
taken = socket.create_server(("127.0.0.1", 0))
os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
"""
CELLS = (
    ("fit(1)", "1 2"),
    ("fit(1)", "1 2"),
    ("fit(2)", "put model, Trainer and fit into a function and call accelight.strategies.notebook_launcher"),
    ("notebook_launcher(fit, (2,), num_processes=2)", "Call torch.distributed.destroy_process_group() first"),
    # More than one thread of OpenMP's before the fork.
    ("dist.destroy_process_group()\ntorch.set_num_threads(2)\n(torch.ones(999, 999) @ torch.ones(999, 999)).sum()", ""),
    ("notebook_launcher(fit, (2,), num_processes=2)", "2 2"),
    ("notebook_launcher(fit, (2,), num_processes=2)", "2 2"),
    ("notebook_launcher(fit, (1,), num_processes=2)", "Trainer(devices=1), but the launcher has started 2 processes"),
    (TAKE_PORT + "fit(1)", "Unset MASTER_PORT"),
    ("notebook_launcher(fit, (2,), num_processes=2)", "2 2"),
)
"""Cells of one notebook, and what each prints or raises."""


@pytest.mark.exhaustive
def test_cells_run_in_any_order_or_say_what_to_do(tmp_path: Path) -> None:
    import nbformat

    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (SETUP, *(cell for cell, _ in CELLS))]
    )
    cells = _execute(notebook, tmp_path).cells[1:]
    found = [_printed(cell).strip() or "".join(_errors(cell)) for cell in cells]
    assert [(cell, text) for (cell, wanted), text in zip(CELLS, found, strict=True) if wanted not in text] == []


# ------------------------------------------------------------------------------------------------
# The same without a kernel.


def _write_place(folder: str, *words: str) -> None:
    state = PartialState()
    total = torch.tensor(float(state.process_index + 1))
    dist.all_reduce(total)
    place = [state.process_index, state.num_processes, state.local_process_index, total.item()]
    (Path(folder) / f"{state.process_index}").write_text(f"{place} {words}")


def _fail_on_one() -> None:
    if PartialState().process_index == 1:
        raise ValueError("a bad batch")
    PartialState().wait_for_everyone()


def _use_a_gpu_that_the_notebook_has_used() -> None:
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with ...")  # torch's words


def _wait_forever(folder: str) -> None:
    (Path(folder) / f"pid {os.getpid()}").touch()
    threading.Event().wait()


def _interrupt_when_two_wait(folder: str) -> None:
    while len(list(Path(folder).glob("pid *"))) < 2:
        time.sleep(0.01)
    time.sleep(1)  # the last fork has returned by then: an interrupt inside of it is lost
    os.kill(os.getpid(), signal.SIGINT)


def _say_what_to_do(function: Callable[[], None] = print, num_processes: int = 2) -> str:
    try:
        notebook_launcher(function, num_processes=num_processes)
    except (RuntimeError, ValueError, ProcessRaisedException) as error:
        return str(error)
    return ""


def _launch(folder: str) -> tuple[list[str], list[str], bool]:
    os.environ["WORLD_SIZE"] = "3"
    said = [_say_what_to_do(num_processes=0), _say_what_to_do()]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said.append(_say_what_to_do())
    dist.destroy_process_group()

    assert PartialState().num_processes == 1  # and each process of the function forgets that
    notebook_launcher(_write_place, (folder, "a", "word"), num_processes=2)
    written = [path.read_text() for path in sorted(Path(folder).iterdir())]
    said += [_say_what_to_do(_fail_on_one), _say_what_to_do(_use_a_gpu_that_the_notebook_has_used)]

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a kernel
    watch = threading.Thread(target=_interrupt_when_two_wait, args=(folder,))
    watch.start()
    interrupted = False
    try:
        notebook_launcher(_wait_forever, (folder,), num_processes=2)
    except KeyboardInterrupt:
        interrupted = True
    watch.join()
    assert multiprocessing.active_children() == []
    return said, written, interrupted


def test_a_function_runs_on_forks_of_this_process(tmp_path: Path) -> None:
    [(said, written, interrupted)] = run_on_ranks(1, _launch, str(tmp_path), init_group=False)
    assert "num_processes must be at least 1, got 0" in said[0]
    assert "in one of 3 processes of a launcher (RANK=0). Use num_processes=3, or unset RANK" in said[1]
    assert "Call torch.distributed.destroy_process_group() first, or restart the kernel" in said[2]
    assert written == [f"[{rank}, 2, {rank}, 3.0] ('a', 'word')" for rank in range(2)]
    assert "Process 1 terminated" in said[3]
    assert "a bad batch" in said[3]
    assert "Restart the kernel, and use GPUs" in said[4]
    assert interrupted


def _launch_on_two(folder: str) -> None:
    notebook_launcher(_write_place, (folder,), num_processes=2)


def test_processes_of_a_launcher_run_the_function_themselves(tmp_path: Path) -> None:
    """So a notebook that was exported as a script runs under torchrun."""
    run_on_ranks(2, _launch_on_two, str(tmp_path), init_group=False)
    assert (tmp_path / "1").read_text() == "[1, 2, 1, 3.0] ()"


def test_one_process_runs_the_function_itself() -> None:
    called: list[int] = []
    notebook_launcher(called.append, (3,), num_processes=1)
    assert called == [3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, (), 2), TypeError, r"function must be a function, got None. Pass the function itself"),
        ((print, 3, 2), TypeError, r"args must be a tuple or list .*, got 3. Use \(3,\)"),
        ((print, "abc", 2), TypeError, r"Use \('abc',\)"),
        ((print, (), "2"), TypeError, "num_processes must be an int, got '2'"),
        ((print, (), True), TypeError, "num_processes must be an int, got True"),
        ((print, (), 0), ValueError, "num_processes must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, Any, Any], error: type[Exception], message: str) -> None:
    function, args, num_processes = arguments
    with pytest.raises(error, match=message):
        notebook_launcher(function, args, num_processes=num_processes)


def test_a_notebook_has_no_script_to_run_again() -> None:
    """Lightning asks for this property in notebooks, and would recommend DDP."""
    assert SubprocessScriptLauncher(LightningEnvironment(), 1, 1).is_interactive_compatible
    with pytest.raises(RuntimeError, match=r"call .*notebook_launcher\(function, num_processes=2\), or run a script"):
        _ = SubprocessScriptLauncher(LightningEnvironment(), 2, 1).is_interactive_compatible
    with pytest.raises(RuntimeError, match="Run a script on each of the 2 machines"):
        _ = SubprocessScriptLauncher(LightningEnvironment(), 1, 2).is_interactive_compatible


@pytest.mark.parametrize(("size", "num_devices"), [("2", 1), ("8", 4)])
def test_a_process_without_a_device_is_refused_on_all(size: str, num_devices: int) -> None:
    """Only the processes without a device failed, with an IndexError, while the others waited for them."""
    with pytest.raises(ValueError, match=f"has started {size} processes .* Use devices={size}, or start {num_devices}"):
        check_devices(num_devices, {"RANK": "0", "LOCAL_WORLD_SIZE": size})


def test_more_devices_than_processes_are_right() -> None:
    check_devices(8, {"RANK": "0", "LOCAL_WORLD_SIZE": "4"})
    check_devices(1, {"LOCAL_WORLD_SIZE": "4"})  # Lightning's own launcher leaves it behind


_EACH = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.nn.parallel import DistributedDataParallel
from accelight.state import PartialState
from accelight.strategies import notebook_launcher

def train(strategy):
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    PartialState().print(strategy, trainer.world_size, trainer.global_step, flush=True)

def loop():
    state = PartialState(cpu=True)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(state.process_index))).sum().backward()
    state.print("loop", state.num_processes, model.module.weight.grad.tolist(), flush=True)

for strategy in ("ddp", "accel_fsdp1", "accel_deepspeed_stage_2"):
    notebook_launcher(train, (strategy,), num_processes=2)
notebook_launcher(loop, num_processes=2)
"""


@pytest.mark.exhaustive
def test_forks_train_with_every_strategy_and_with_a_loop_of_ones_own() -> None:
    lines = run_script(_EACH, timeout_s=200).lines
    for expected in ("ddp 2 4", "accel_fsdp1 2 4", "accel_deepspeed_stage_2 2 4", "loop 2 [[0.5, 0.5]]"):
        assert lines.count(expected) == 1, lines
