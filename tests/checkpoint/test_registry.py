"""The registry of formats: what is listed there is found, merged, compared, described and removed, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelight.checkpoint import CheckpointError, Manifest, inspect_checkpoint, merge_fsdp_weights, verify_merged
from accelight.checkpoint import locate as registry
from accelight.checkpoint.cli import main
from accelight.checkpoint.formats.base import (
    DTYPES,
    CheckpointInfo,
    Format,
    Piece,
    ShardFile,
    Source,
    SourceTensor,
    StoredTensorInfo,
)
from accelight.checkpoint.locate import find_checkpoint
from tests.checkpoint import damage

CHECKPOINT = Path(__file__).parents[2] / "checkpoint"


class PartsFormat(Format):
    """A tensor ``w`` of float32, one after the other in files ``0.part``, ``1.part`` and so on."""

    signs = ("files called N.part",)

    def detect(self, folder: Path) -> bool:
        return (folder / "0.part").is_file()

    def open(self, folder: Path) -> tuple[Source, Manifest | None]:
        tensor = self._tensor(folder)

        def locate(wanted: Iterable[str]) -> dict[str, SourceTensor]:
            return dict.fromkeys(wanted, tensor)

        return Source(folder, {"w": tensor}, {}, locate), None

    def describe(self, folder: Path) -> CheckpointInfo:
        tensor = self._tensor(folder)
        files = tuple(ShardFile(piece.path.name, piece.path.stat().st_size, 1) for piece in tensor.pieces)
        told = StoredTensorInfo.of("w", tensor.dtype, tensor.shape, len(files))
        return CheckpointInfo(folder, "parts", "", (told,), files, has_optimizer=False)

    def named_inside(self, folder: Path) -> Path | None:
        pointer = folder / "newest"
        return folder / pointer.read_text() if pointer.is_file() else None

    def why_unreadable(self, folder: Path) -> str | None:
        return "has the first part missing." if (folder / "1.part").is_file() else None

    def _tensor(self, folder: Path) -> SourceTensor:
        pieces, start = [], 0
        for path in sorted(folder.glob("*.part")):
            pieces.append(Piece(path, 0, (start,), (path.stat().st_size // 4,)))
            start += path.stat().st_size // 4
        return SourceTensor("w", DTYPES["float32"], (start,), tuple(pieces))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Register the format by one line, and save a tensor in it."""
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, PartsFormat()))
    folder = tmp_path / "run" / "in"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"{number}.part").write_bytes(torch.arange(3.0).add(3 * number).numpy().tobytes())
    return folder


def test_a_new_format_is_found(folder: Path) -> None:
    for given in (folder, folder.parent):
        found = find_checkpoint(given)
        assert (found.folder, type(found.format)) == (folder, PartsFormat)


def test_a_new_format_is_found_by_its_pointer(folder: Path) -> None:
    damage.good(folder.parent / "another")
    (folder.parent / "newest").write_text("in")
    assert find_checkpoint(folder.parent).folder == folder


def test_a_new_format_is_one_of_several(folder: Path) -> None:
    damage.good(folder.parent / "another")
    with pytest.raises(CheckpointError, match=r"holds several checkpoints: another, in\."):
        find_checkpoint(folder.parent)


def test_a_new_format_is_merged_and_compared(folder: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(folder, tmp_path / "out", verify=True)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], torch.arange(6.0))
    assert verify_merged(folder, tmp_path / "out").is_equal


def test_a_new_format_is_described(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    info = inspect_checkpoint(folder)
    assert (info.kind, info.num_parameters, info.num_bytes, info.num_chunks) == ("parts", 6, 24, 2)
    assert main(["inspect", str(folder)]) == 0
    assert "kind         parts" in capfd.readouterr().out


def test_a_new_format_is_removed(folder: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(folder, tmp_path / "out", remove_checkpoint_dir=True)
    assert list(folder.parent.iterdir()) == []


def test_a_new_format_says_what_was_looked_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"neither \.metadata .*, nor files called N\.part\. It holds nothing\.$"):
        find_checkpoint(tmp_path / "empty")
    (folder / "0.part").unlink()
    with pytest.raises(CheckpointError, match=r"in has the first part missing\.$"):
        find_checkpoint(folder)


def test_no_format_is_named_outside_the_registry() -> None:
    """Next to ``formats``, and in ``writing``, only the registry imports a format: a new one changes nothing else."""
    folders = {type(one).__module__.rpartition(".")[2] for one in registry.FORMATS}
    assert folders == {"dcp", "zero"}
    others = set(CHECKPOINT.glob("*.py")) - {CHECKPOINT / "locate.py"}
    for path in (*others, *(CHECKPOINT / "writing").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not folders & set((node.module or "").split(".")), f"{path} imports {node.module}"
