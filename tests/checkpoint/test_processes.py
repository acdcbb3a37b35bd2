"""The merge in a process group: one process works, all get the report or an error that names it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from accelight.checkpoint import CheckpointError, MergeReport, merge_fsdp_weights
from tests.checkpoint import damage, saving
from tests.ranks import run_on_ranks


def _merge_twice(checkpoint: str, output: str) -> list[MergeReport]:
    reports = [merge_fsdp_weights(checkpoint, f"{output}/{number}") for number in range(2)]
    dist.barrier()  # nobody is ahead, nobody is behind
    return reports


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_get_the_same_report(tmp_path: Path, world_size: int) -> None:
    run_on_ranks(world_size, saving.save_engine, str(tmp_path / "in"), "fsdp2", False, True)
    results = run_on_ranks(world_size, _merge_twice, str(tmp_path / "in"), str(tmp_path))
    assert all(reports == results[0] for reports in results)
    for number, report in enumerate(results[0]):
        assert report.destination == tmp_path / str(number)
        merged = load_file(tmp_path / str(number) / "model.safetensors")
        assert all(torch.equal(merged[name], value) for name, value in saving.full_state_dict().items())


def _merge_slowly(checkpoint: str, output: str) -> tuple[float, bool]:
    """Let the main process come late; return when this one was done, and whether it found the result."""
    if dist.get_rank() == 0:
        time.sleep(0.3)
    merge_fsdp_weights(checkpoint, output)
    return time.monotonic(), (Path(output) / "model.safetensors").is_file()


def test_the_others_wait_until_the_result_is_there(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    assert all(found for _, found in run_on_ranks(2, _merge_slowly, str(folder), str(tmp_path / "out")))


def _merge_and_catch(checkpoint: str, output: str) -> tuple[str, str, int]:
    try:
        merge_fsdp_weights(checkpoint, output)
    except CheckpointError as error:
        caught: Any = error
    total = torch.ones(1)
    dist.all_reduce(total)  # the processes still agree on what comes next
    merge_fsdp_weights(f"{checkpoint}-good", output)
    return type(caught).__name__, str(caught), int(total)


def test_an_error_reaches_all(tmp_path: Path) -> None:
    damage.good(tmp_path / "in-good")
    folder = damage.good(tmp_path / "in")
    (folder / ".metadata").write_bytes(b"")
    main, *others = run_on_ranks(3, _merge_and_catch, str(folder), str(tmp_path / "out"))
    assert main[:2] == ("CheckpointError", f"{folder}/.metadata: the pickle is cut off after 0 bytes, or damaged.")
    for name, message, total in others:
        assert name == "CheckpointError"
        assert "failed on the main process" in message
        assert "process 0 raised CheckpointError" in message
        assert "the pickle is cut off" in message
        assert total == 3


def _disk_error(checkpoint: str) -> str:
    try:
        merge_fsdp_weights(checkpoint, "/proc/merged")
    except (OSError, CheckpointError) as error:
        return type(error).__name__
    return "nothing"


def test_an_error_of_the_system_reaches_all(tmp_path: Path) -> None:
    main, other = run_on_ranks(2, _disk_error, str(damage.good(tmp_path / "in")))
    assert main in ("FileNotFoundError", "PermissionError", "OSError")
    assert other == "CheckpointError"


def _wrong_argument(checkpoint: str) -> str:
    with pytest.raises(ValueError, match="threads") as caught:
        merge_fsdp_weights(checkpoint, "out", threads=0)
    return str(caught.value)


def test_a_wrong_argument_is_an_error_on_each(tmp_path: Path) -> None:
    assert len(set(run_on_ranks(2, _wrong_argument, str(tmp_path)))) == 1


def _without_a_group(checkpoint: str, output: str) -> int:
    return merge_fsdp_weights(checkpoint, f"{output}{os.getpid()}").num_tensors


def test_without_a_group_each_merges_for_itself(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    assert run_on_ranks(2, _without_a_group, str(folder), str(tmp_path / "out"), init_group=False) == [2, 2]
