"""DCP's safetensors format: against torch's own reader and consolidation, and with damaged shards."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accelight.checkpoint import CheckpointError, inspect_checkpoint, merge_fsdp_weights, verify_merged
from tests.checkpoint.saving import layout_tensors
from tests.checkpoint.without_torch import WITHOUT_TORCH
from tests.ranks import run_on_ranks


def placed() -> dict[str, tuple[torch.Tensor, int | None]]:
    """Return each tensor, and the dimension it is cut along; an empty shard and one of zero size are among them."""
    tensors: dict[str, tuple[torch.Tensor, int | None]] = {}
    for name, tensor in layout_tensors().items():
        for dim in (None, *range(tensor.dim())):
            tensors[f"{name}.{dim}"] = (tensor, dim)
    return tensors | {"scalar": (torch.tensor(3.0), None), "int": (torch.arange(7), 0)}


def save_safetensors(folder: str, consolidate: bool = False, num_files: int | None = None) -> None:
    """Save every layout with torch's writer, one file a process or several.

    The consolidation of torch 2.13 fails on integers and writes zeros for scalars: they are left out for it.
    """
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        name: distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim)], src_data_rank=None)
        for name, (tensor, dim) in placed().items()
        if not consolidate or (tensor.is_floating_point() and tensor.dim())
    }
    index = None if num_files is None else {name: 1 + number % num_files for number, name in enumerate(state)}
    writer = HuggingFaceStorageWriter(
        folder, fqn_to_index_mapping=index, save_distributed=True, enable_consolidation=consolidate
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, storage_writer=writer)


def merged(folder: Path, output: Path, **options: Any) -> dict[str, torch.Tensor]:
    merge_fsdp_weights(folder, output, verify=True, **options)
    return load_file(output / "model.safetensors")


@pytest.mark.parametrize(("world_size", "num_files"), [(2, None), (3, None), (2, 3)])
def test_every_layout_as_torchs_reader_reads_it(tmp_path: Path, world_size: int, num_files: int | None) -> None:
    run_on_ranks(world_size, save_safetensors, str(tmp_path / "in"), False, num_files)
    found = merged(tmp_path / "in", tmp_path / "out")
    expected = {name: torch.full_like(tensor, 9) for name, (tensor, _) in placed().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(expected, storage_reader=HuggingFaceStorageReader(str(tmp_path / "in")), no_dist=True)
    assert found.keys() == expected.keys()
    for name, (tensor, _) in placed().items():
        assert torch.equal(found[name], expected[name])
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    assert verify_merged(tmp_path / "in", tmp_path / "out").is_equal


def test_as_torchs_consolidation(tmp_path: Path) -> None:
    """The folder above is given, in which torch puts its own result beside ``sharded``."""
    run_on_ranks(2, save_safetensors, str(tmp_path / "in"), True)
    found = merged(tmp_path / "in", tmp_path / "out")
    (path,) = (tmp_path / "in").glob("*.safetensors")
    expected = load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_it_is_inspected(tmp_path: Path) -> None:
    run_on_ranks(2, save_safetensors, str(tmp_path))
    info = inspect_checkpoint(tmp_path)
    assert info.kind == "torch-dcp-safetensors"
    assert (info.model_prefix, info.has_optimizer, len(info.tensors)) == ("", False, len(placed()))
    assert [file.name for file in info.files] == [
        f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)
    ]


# --- damaged


def write_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor], info: object) -> None:
    folder.mkdir(exist_ok=True)
    metadata = {"DCP_SHARDING_INFO": info if isinstance(info, str) else json.dumps(info)}
    path = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
    save_file(tensors, path, metadata)


def at(*offsets: int) -> dict[str, Any]:
    return {"w": {"saved_offsets": offsets}}


def test_a_shard_written_by_hand(tmp_path: Path) -> None:
    write_shard(tmp_path / "in", 1, {"w": torch.zeros(2, 3)}, at(0, 0))
    write_shard(tmp_path / "in", 2, {"w": torch.ones(1, 3)}, at(2, 0))
    write_shard(tmp_path / "in", 3, {"w": torch.ones(1, 3)}, at(2, 0))  # a replica
    assert torch.equal(merged(tmp_path / "in", tmp_path / "out")["w"], torch.tensor([[0.0], [0], [1]]).expand(3, 3))


@pytest.mark.parametrize(
    ("tensor", "info", "message"),
    [
        (torch.ones(1, 3), at(3, 0), r"its 2 chunks hold 9: part of it is missing"),
        (torch.ones(2, 3), at(1, 0), "has overlapping chunks"),
        (torch.ones(1, 3).half(), at(2, 0), r"tensor 'w' is float32 in shard-00001.* and float16 in shard-00002"),
        (torch.ones(3), at(2), "has a different number of dimensions in shard-00001"),
        (torch.ones(1, 3), at(2), r"tensor 'w' of shape \[1, 3\] has the invalid offsets \[2\]"),
        (torch.ones(1, 3), at(2, -1), r"has the invalid offsets \[2, -1\]"),
        (torch.ones(1, 3), {"w": {"saved_offsets": [2.0, 0]}}, r"has the invalid offsets \[2.0, 0\]"),
        (torch.ones(1, 3), {}, "DCP_SHARDING_INFO does not give the position of every tensor"),
        (torch.ones(1, 3), [], "DCP_SHARDING_INFO does not give the position of every tensor"),
        (torch.ones(1, 3), "{", "DCP_SHARDING_INFO does not give the position of every tensor"),
    ],
)
def test_shards_that_do_not_fit(tmp_path: Path, tensor: torch.Tensor, info: object, message: str) -> None:
    write_shard(tmp_path / "in", 1, {"w": torch.zeros(2, 3)}, at(0, 0))
    write_shard(tmp_path / "in", 2, {"w": tensor}, info)
    with pytest.raises(CheckpointError, match=message):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _without_places(path: Path) -> None:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_places, "the header has no DCP_SHARDING_INFO"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "the tensors end at byte"),
        (lambda path: path.rename(path.with_name("moved")) and path.symlink_to("/etc/hostname"), "a link out of"),
    ],
)
def test_files_that_are_no_shards(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write_shard(tmp_path / "in", 1, {"w": torch.zeros(2, 3)}, at(0, 0))
    (path,) = (tmp_path / "in").glob("shard-*")
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


def test_torch_is_never_imported(tmp_path: Path) -> None:
    write_shard(tmp_path / "in", 1, {"w": torch.zeros(2, 3)}, at(0, 0))
    write_shard(tmp_path / "in", 2, {"w": torch.ones(2, 1)}, at(0, 3))
    code = [sys.executable, "-c", WITHOUT_TORCH]
    for command in (["merge-weights", "in", "out"], ["verify", "in", "out"], ["inspect", "in"]):
        subprocess.run([*code, *command], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)
