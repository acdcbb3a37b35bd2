"""Safetensors files reach every shard bit for bit, each process reading its own slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file, save_model

from accelight.strategies.fsdp import fsdp2_load_safetensors
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.loading import Process, assert_equals, build, full_dict, process, shard


def _stored(form: str, path: Path) -> Path:
    """Write `full_dict` with the tied tensor once, under the other name than the model keeps."""
    state = {name: value.contiguous() for name, value in full_dict().items() if name != "embed.weight"}
    if form == "file":
        save_file(state, path / "some.safetensors", metadata={"embed.weight": "head.weight", "format": "pt"})
        return path / "some.safetensors"
    if form == "save_model":
        model = build("cpu")
        model.load_state_dict(full_dict())
        save_model(model, str(path / "model.safetensors"))
        return path
    names = sorted(state)
    files = {"one.safetensors": names[:4], "two.safetensors": names[4:]}
    for file, held in files.items():
        save_file({name: state[name] for name in held}, path / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def _load(path: str, device: str, shape: tuple[int, int] | None) -> None:
    model = shard(build(device), shape)
    fsdp2_load_safetensors(process(), model, path, buffers_from=build("cpu") if device == "meta" else None)
    assert_equals(model, full_dict())
    assert model.head.weight is model.embed.weight
    assert model.layers[1].table.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("form", ["file", "folder", "save_model"])
@pytest.mark.parametrize(
    ("world_size", "shape", "device"), [(1, None, "meta"), (2, None, "cpu"), (3, None, "meta"), (4, (2, 2), "meta")]
)
def test_every_shard_is_read(
    tmp_path: Path, form: str, world_size: int, shape: tuple[int, int] | None, device: str
) -> None:
    run_on_ranks(world_size, _load, str(_stored(form, tmp_path)), device, shape)


def _refuse(path: str, device: str) -> str:
    model: Any = shard(build(device))
    if dist.get_rank() == 1 and path.endswith("seen by one.safetensors"):
        path += ".gone"
    with pytest.raises(RuntimeError) as caught:
        fsdp2_load_safetensors(process(), model, path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "every process: missing in the file: layers.0.linear.weight"),
        ("unexpected", "unexpected in the file: stray"),
        ("shape", r"'layers.0.linear.weight' is \(5, 3\) in the file, \(5, 4\) in the model"),
        ("buffer", r"the buffer 'layers.0.table' \(3,\) is not persistent"),
        ("seen by one", "process 1: FileNotFoundError: no such file"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(tmp_path: Path, kind: str, message: str) -> None:
    state = {name: value for name, value in full_dict().items() if name != "head.weight"}
    weight = state["layers.0.linear.weight"]
    if kind == "missing":
        del state["layers.0.linear.weight"]
    elif kind == "unexpected":
        state["stray"] = weight.clone()
    elif kind == "shape":
        state["layers.0.linear.weight"] = weight[:, :3].contiguous()
    path = tmp_path / f"{kind}.safetensors"
    save_file(state, path)
    for text in run_on_ranks(2, _refuse, str(path), "meta" if kind == "buffer" else "cpu"):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(text)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"weight": "../other.safetensors"}, r"names files outside its folder: \['../other.safetensors'\]"),
        ({"weight": "one.safetensors", "gone": "one.safetensors"}, "its files do not hold: gone"),
        ({"weight": "gone.safetensors"}, "FileNotFoundError: no such file: .*gone.safetensors"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    model = torch.nn.Linear(2, 3, bias=False)
    save_file({"weight": torch.ones(3, 2)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(RuntimeError, match=message):
        fsdp2_load_safetensors(Process(torch.device("cpu"), True), model, tmp_path)
