"""Shards of large tensors lie so that a merge can link them; they cost little, and every reader reads them."""

from __future__ import annotations

import filecmp
import io
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accelight.checkpoint import merge, merge_fsdp_weights
from accelight.checkpoint.locate import find_checkpoint
from accelight.checkpoint.writing.plan import LINK_BYTES
from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint.writer import AlignedFile, FolderWriter, Place, places
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer, rank_loader


class Large(LightningModule):
    """One tensor that fills whole blocks, one whose rows do not, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole = nn.Parameter(torch.randn(3072, 1024))
        self.rows = nn.Parameter(torch.randn(3001, 1000))
        self.small = nn.Parameter(torch.randn(1000))

    def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
        return self.whole.mean() + self.rows.mean() + self.small.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saving(Callback):
    """Saves twice, so that the folder that is looked at is one that went by a kept plan."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        trainer.save_checkpoint(self.path)


def _save(version: int, in_background: bool, path: str) -> None:
    kind = "sharded_state_dict"
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type=kind, async_save=in_background)
    trainer = quiet_trainer(strategy, 2, max_steps=2, callbacks=[Saving(path)])
    trainer.fit(Large(), rank_loader(2))


def _resume(version: int, path: str) -> int:
    trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=version), 2, max_steps=3)
    trainer.fit(Large(), rank_loader(2), ckpt_path=path)
    return trainer.global_step


@pytest.mark.core("2-True")
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_saves_of_the_strategy(version: int, in_background: bool, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    run_on_ranks(2, _save, version, in_background, str(folder))
    _check_gaps(folder)
    assert run_on_ranks(2, _resume, 3 - version, str(folder)) == [3, 3]  # every byte is checked
    found = find_checkpoint(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "can_link", lambda *_: True)  # on whichever disk
        _, _, plan = merge.plan_merge(
            found,
            strip_prefix=None,
            include=None,
            exclude=None,
            dtype=None,
            max_shard_bytes=None,
            safe=True,
            link_to=tmp_path,
        )
    assert [tensor.name for tensor in plan.files[0].tensors] == ["whole", "rows", "small"]
    # FSDP1 cuts where half of all elements are, 281 KB before the end of a tensor: too few to be linked.
    assert plan.num_linkable > (0.99 if version == 2 else 0.98) * plan.num_bytes
    merge_fsdp_weights(folder, tmp_path / "ours", verify=True)
    merged = load_file(tmp_path / "ours/model.safetensors")
    assert merged.keys() == set(dict(Large().named_parameters()))
    key = next(iter(FileSystemReader(folder).read_metadata().state_dict_metadata)).split(".")[0]
    loaded = {key: {name: torch.zeros_like(tensor) for name, tensor in merged.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(loaded, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(tensor, loaded[key][name]) for name, tensor in merged.items())


def test_accelerates_merge(tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights as accelerates

    state = {name: tensor.detach() for name, tensor in Large().named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model": state}, storage_writer=FolderWriter(tmp_path / "in"), no_dist=True)
        accelerates(str(tmp_path / "in"), str(tmp_path / "theirs"))
    merge_fsdp_weights(tmp_path / "in", tmp_path / "ours", verify=True)
    merge_fsdp_weights(tmp_path / "in", tmp_path / "copied", reflink=False)
    assert filecmp.cmp(tmp_path / "copied/model.safetensors", tmp_path / "theirs/model.safetensors", shallow=False)
    merged = load_file(tmp_path / "ours/model.safetensors")
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in state.items())


def _check_gaps(folder: Path) -> None:
    """Check that records do not overlap, and that at most a thousandth of the files is between them."""
    records: dict[str, list[tuple[int, int]]] = {}
    for info in FileSystemReader(folder).read_metadata().storage_data.values():
        records.setdefault(info.relative_path, []).append((info.offset, info.length))
    assert len(records) == 2
    for name, own in records.items():
        gaps = end = 0
        for offset, length in sorted(own):
            assert offset >= end
            gaps, end = gaps + offset - end, offset + length
        assert 0 < gaps <= end / 1000
        assert end == (folder / name).stat().st_size


def item(fqn: str, rows: int, columns: int = 1024, first: int = 0, of: int | None = None) -> WriteItem:
    """Return a piece of rows of a tensor of fp32."""
    chunk = ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((rows, columns)))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size((of or rows, columns)))
    return WriteItem(MetadataIndex(fqn), WriteItemType.SHARD, tensor_data=data)


def test_the_largest_weights_are_chosen() -> None:
    items = [
        item("optimizer_0.state.a", 1000),
        item("model.b", 300),
        item("model.c", 600),
        item("model.d", 1),
        replace(item("model.bytes", 1), type=WriteItemType.BYTE_IO, tensor_data=None),
    ]
    assert places(items) == [None, None, Place(0, 600 * LINK_BYTES), None, None]
    assert places(items[1:]) == [None] * 4  # a gap would be more than a thousandth
    half = item("model.e", 2000, 1001, 1001, 3001)
    assert places([half]) == [Place(1001 * 1001 * 4 % LINK_BYTES, 2000 * 1001 * 4)]
    columns = replace(half.tensor_data, size=torch.Size((3001, 2002)))  # type: ignore[type-var]
    assert places([replace(half, tensor_data=columns)]) == [None]


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    """Whatever the order: a record that was not expected, one without its tensor, a tensor in several calls."""
    large = bytes(range(256)) * 1000
    path = tmp_path / "file"
    wanted = [Place(8, len(large)), None, Place(0, len(large)), Place(0, 100_000_000), Place(0, len(large))]
    records = [[b"head", large, b"tail"], [b"other"], [b"no tensor"], [b"one", large, large], [b"1", large], [b"more"]]
    places: list[tuple[int, int]] = []
    with AlignedFile(path, wanted) as file:
        for record in records:
            start = file.tell()
            for data in record:
                file.write(memoryview(data))
            places.append((start, file.tell() - start))
            assert file.tell() == sum(places[-1])
    content = path.read_bytes()
    for (start, length), record in zip(places, records, strict=True):
        assert content[start + file.gaps.get(start, 0) : start + length] == b"".join(record)
    assert len(file.gaps) == 2
    assert [
        (content.index(large, start) - phase) % LINK_BYTES for (start, _), phase in ((places[0], 8), (places[4], 0))
    ] == [0, 0]
    assert isinstance(file, io.BufferedWriter)
