"""Finds and reads what a merge has written: one file, or several with an index."""

from __future__ import annotations

from pathlib import Path

from .errors import CheckpointError
from .formats.index_file import read_weight_map
from .formats.safe_paths import file_inside
from .formats.safetensors.file import read_safetensors
from .formats.tensor_file import TensorFile
from .formats.torch_save.state_dict_file import read_state_dict_file
from .writing.output import RESULT_NAMES


def read_result(path: Path) -> tuple[list[TensorFile], dict[str, str]]:
    """Return the files of a result, and what is wrong in its index.

    Args:
        path: The folder, of which the file is taken that loaders prefer, or one of `RESULT_NAMES`.

    Raises:
        CheckpointError: If there is none, or it is not what its name says.
    """
    if path.is_dir():
        found = [path / name for name in RESULT_NAMES if (path / name).is_file()]
        if not found:
            raise CheckpointError(f"{path} holds none of {', '.join(RESULT_NAMES)}.")
        path = found[0]
    if path.name.endswith(".index.json"):
        return _read_index(path)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; a merged folder, a .safetensors or a .bin file was looked for.")
    return [_read_file(path)], {}


def _read_file(path: Path) -> TensorFile:
    return read_state_dict_file(path) if path.suffix == ".bin" else read_safetensors(path)


def _read_index(path: Path) -> tuple[list[TensorFile], dict[str, str]]:
    weight_map = read_weight_map(path)
    names = sorted(set(weight_map.values()))
    files = [_read_file(file_inside(path.parent, name, str(path))) for name in names]
    found: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for file_name, file in zip(names, files, strict=True):
        for name in file.tensors:
            if name in found:
                wrong[name] = f"in {found[name]} and in {file_name}"
            elif weight_map.get(name) != file_name:
                wrong[name] = f"in {file_name}, {path.name} says {weight_map.get(name)}"
            found[name] = file_name
    wrong |= {
        name: f"not in {file_name}, where {path.name} says it is"
        for name, file_name in weight_map.items()
        if name not in found
    }
    return files, wrong
