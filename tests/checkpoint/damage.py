"""Good checkpoints made bad: metadata edited with torch's own classes, records rebuilt, bytes cut off."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.saving import save


def good(folder: Path, **tensors: torch.Tensor) -> Path:
    return save(folder, {"model": tensors or {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)}})


def edit_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    """Load ``.metadata`` as torch does (it is our own), change it, write it back."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def storage_of(metadata: Any, fqn: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


def index_of(metadata: Any, fqn: str) -> Any:
    return next(index for index in metadata.storage_data if index.fqn == fqn)


def place_of(folder: Path, fqn: str) -> int:
    """Return where a tensor's record begins in its file."""
    offset: int = storage_of(pickle.loads((folder / ".metadata").read_bytes()), fqn).offset
    return offset


def replace_record(folder: Path, fqn: str, record: bytes) -> None:
    """Let ``fqn`` point at these bytes, in a file of their own."""
    (folder / "other.distcp").write_bytes(record)

    def change(metadata: Any) -> None:
        info = storage_of(metadata, fqn)
        info.relative_path, info.offset, info.length = "other.distcp", 0, len(record)

    edit_metadata(folder, change)


def record_of(folder: Path, fqn: str) -> bytes:
    info = storage_of(pickle.loads((folder / ".metadata").read_bytes()), fqn)
    data: bytes = (folder / info.relative_path).read_bytes()
    return data[info.offset : info.offset + info.length]


def rebuild(record: bytes, compression: int = zipfile.ZIP_STORED, **members: bytes | None) -> bytes:
    """Return the record with some members replaced (``data_pkl`` is data.pkl, ``data_0`` is data/0) or left out."""
    new = {{"data_pkl": "data.pkl", "data_0": "data/0"}.get(name, name): value for name, value in members.items()}
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(record)) as old, zipfile.ZipFile(out, "w", compression) as target:
        for name in old.namelist():
            short = name.partition("/")[2]
            value = new.get(short, old.read(name))
            if value is not None:
                target.writestr(name, value)
    return out.getvalue()


def torch_record(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
