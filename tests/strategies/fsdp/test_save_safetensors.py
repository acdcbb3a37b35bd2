"""`save_safetensors`: every process writes its own bytes, and the files are those that the merge makes."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint import safetensors
from accelight.strategies.fsdp.checkpoint.safetensors import _Part, _runs, in_host_memory
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import BLOCKS
from tests.strategies.oracle import WIDTH, Case, Outcome, TinyModule, quiet_trainer, rank_loader

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"max_shard_size": 300, "strip_prefix": "auto"},
    "bf16": {"dtype": "bf16", "strip_prefix": "model"},
}


class Module(TinyModule):
    """With ties, a frozen parameter, a whole one, buffers of several dtypes, and one that no file holds."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__(Case(), Outcome())
        self.model.tied = nn.Linear(5, WIDTH)
        self.model.tied.weight = self.model.embed.weight
        self.model.embed.bias.requires_grad_(not frozen)
        self.model.extra = nn.Linear(3, 3)
        self.model.register_buffer("count", torch.tensor(3))
        self.model.register_buffer("mask", torch.tensor([True, False, True]))
        self.model.register_buffer("scratch", torch.zeros(2), persistent=False)


def _fit(options: dict[str, Any]) -> tuple[Any, AccelFSDPStrategy]:
    strategy = AccelFSDPStrategy(
        state_dict_type="sharded_state_dict", ignored_modules="model\\.extra", **BLOCKS, **options
    )
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_steps=1, max_epochs=1)
    frozen = options["fsdp_version"] == 2 or options.get("use_orig_params", False)
    trainer.fit(Module(frozen=frozen), rank_loader(dist.get_world_size()))
    return trainer, strategy


def _save_both_ways(options: dict[str, Any], folder: str) -> list[Any]:
    trainer, strategy = _fit(options)
    trainer.save_checkpoint(f"{folder}/sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "_SHARED_FROM_BYTES", 0)  # so that all have a part in unsharded parameters
        through_blocks = partial(in_host_memory, block_bytes=64, copy_all=True)  # as from a device
        patch.setattr(safetensors, "in_host_memory", through_blocks)
        reports = [strategy.save_safetensors(f"{folder}/direct_{name}", **more) for name, more in OPTIONS.items()]
    reports.append(strategy.save_safetensors(f"{folder}/made/for/it/weights.safetensors"))
    return [(report.files, report.num_bytes, report.ties, report.skipped) for report in reports]


def assert_same_tensors(one: Path, other: Path) -> None:
    """Compare folders with an index, whatever lies in which file."""
    found, expected = (
        {
            name: load_file(folder / file)[name]
            for name, file in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].items()
        }
        for folder in (one, other)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.core("2-fsdp_version=1-use_orig_params=True", "3-fsdp_version=2", "2-fsdp_version=2-cpu_offload")
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"fsdp_version": 1}),
        (1, {"fsdp_version": 2}),
        (2, {"fsdp_version": 1}),
        (2, {"fsdp_version": 1, "use_orig_params": True}),
        (2, {"fsdp_version": 1, "sharding_strategy": "NO_SHARD", "use_orig_params": True}),
        (2, {"fsdp_version": 2, "activation_checkpointing": True}),
        (2, {"fsdp_version": 2, "cpu_offload": True}),
        (3, {"fsdp_version": 1, "use_orig_params": True}),
        (3, {"fsdp_version": 2}),
        (4, {"fsdp_version": 1, "device_mesh": (2, 2), "use_orig_params": True}),
        (4, {"fsdp_version": 2, "device_mesh": (2, 2)}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_the_files_are_those_of_a_merge(world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    reports = run_on_ranks(world_size, _save_both_ways, options, str(tmp_path))
    assert reports == [reports[0]] * world_size
    for (name, more), (files, num_bytes, ties, _) in zip(OPTIONS.items(), reports[0], strict=False):
        merged, direct = tmp_path / f"merged_{name}", tmp_path / f"direct_{name}"
        report = merge_fsdp_weights(tmp_path / "sharded", merged, progress=False, **more)
        assert sorted(item.name for item in direct.iterdir()) == sorted(files)
        if name == "split" and world_size > 1:
            # DCP lists unsharded tensors in an order of its own; ours is the model's.
            assert_same_tensors(direct, merged)
            continue
        assert (files, num_bytes, ties) == (report.files, report.num_bytes, report.ties)
        for file in files:
            assert filecmp.cmp(direct / file, merged / file, shallow=False), file
    assert filecmp.cmp(tmp_path / "made/for/it/weights.safetensors", tmp_path / "merged_plain/model.safetensors", False)
    assert len(reports[0][1][0]) > 3  # was split
    assert reports[0][0][2] == {"model.tied.weight": "model.embed.weight"}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_runs_of_all_parts_make_the_tensor(data: st.DataObject) -> None:
    """Any grid of chunks, some of them empty, each held by several: every element is written once, and at its place."""
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    num_shares = data.draw(st.integers(1, 3))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    written = torch.full((whole.numel(),), -1)
    for offsets, sizes in _grid(cuts):
        local = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
        for share in range(num_shares):
            for start, position, count in _runs(shape, _Part(local, offsets, sizes, share, num_shares)):
                assert (written[position : position + count] == -1).all()
                written[position : position + count] = local[start : start + count]
    assert torch.equal(written, whole.reshape(-1))


def _grid(cuts: list[list[int]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not cuts:
        yield (), ()
        return
    for start, stop in zip(cuts[0], cuts[0][1:], strict=False):
        for offsets, sizes in _grid(cuts[1:]):
            yield (start, *offsets), (stop - start, *sizes)


def _raise(*_: Any) -> None:
    raise OSError("this disk is gone")


def _failures(folder: str) -> list[str]:
    """What each process is told, one attempt after the other; the last one is made on process 0 alone."""
    _, strategy = _fit({"fsdp_version": 2})
    rank, messages = dist.get_rank(), []

    def attempt(path: str, **more: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            strategy.save_safetensors(f"{folder}/{path}", **more)
        messages.append(str(caught.value))

    attempt("a.safetensors", max_shard_size="1GB")
    attempt("new", dtype="int8")
    attempt("file/model.safetensors")
    attempt("has_single", max_shard_size=300)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(safetensors, "_write_parts", _raise)
        attempt("new")
    if rank == 0:
        attempt("new")
    return messages


def test_what_goes_wrong_is_told_to_everyone_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "has_single").mkdir()
    (tmp_path / "has_single/model.safetensors").write_text("untouched")
    first, second = run_on_ranks(2, _failures, str(tmp_path), group_timeout_s=5)
    assert first[:5] == second
    for message, expected in zip(
        first,
        [
            "every process: ValueError: max_shard_size needs a folder",
            "every process: ValueError: dtype must be one of",
            "failed on rank 0: ",
            "loaders prefer",
            "process 1: OSError: this disk is gone",
            "strategy.save_safetensors was called on process 0 of 2 only",
        ],
        strict=True,
    ):
        assert expected in message
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "has_single"]
    assert [item.name for item in (tmp_path / "has_single").iterdir()] == ["model.safetensors"]


def _save_again(folder: str) -> None:
    _, strategy = _fit({"fsdp_version": 2})
    Path(folder, ".again.model.safetensors.unfinished").write_text("left by a killed run, and longer" * 1000)
    strategy.save_safetensors(f"{folder}/again", max_shard_size=300)
    strategy.save_safetensors(f"{folder}/again", max_shard_size=600)  # fewer files: the others go
    strategy.save_safetensors(f"{folder}/again.safetensors")
    strategy.save_safetensors(f"{folder}/again.safetensors", dtype="float64")


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    run_on_ranks(2, _save_again, str(tmp_path))
    index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
    files = {item.name for item in (tmp_path / "again").iterdir()}
    assert files == {*index["weight_map"].values(), "model.safetensors.index.json"}
    loaded: dict[str, Tensor] = load_file(tmp_path / "again.safetensors")
    assert loaded["model.embed.weight"].dtype == torch.float64
    assert loaded["model.count"].item() == 3
