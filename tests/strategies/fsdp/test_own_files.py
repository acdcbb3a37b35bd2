"""Whose files stand where a checkpoint is to be written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from accelight.checkpoint import atomic_dir as atomic
from accelight.checkpoint.atomic_dir import check_replaceable, files_of_others, keep_files_of_others

_DCP = [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt", "accelight.json"]
_LOCAL = ["rank_00000_of_00002.pt", "rank_00001_of_00002.pt", "meta.pt"]
_STAGE_2 = [
    "latest",
    "zero_to_fp32.py",
    "model.safetensors",
    "checkpoint/mp_rank_00_model_states.pt",
    "checkpoint/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "checkpoint/offloaded_tensors/rank0/0.tensor.swp",
    "checkpoint_universal/zero/layer/fp32.pt",
    "latest_universal",
    "averaged_weights/.metadata",
    "averaged_weights/__0_0.distcp",
    "averaged_weights/accelight.json",
]
_SAVE = "0123456789abcdef" * 2  # a generation's name, in what was copied from an object store
CHECKPOINTS = {
    "dcp": _DCP,
    "of two kinds": [*_DCP, *_LOCAL],
    "local": _LOCAL,
    "deepspeed": _STAGE_2,
    "downloaded dcp": [".metadata", f"{_SAVE}/__0_0.distcp", f"{_SAVE}/meta.pt", f"{_SAVE}/accelight.json"],
    "downloaded deepspeed": [
        *("latest", f"{_SAVE}/mp_rank_00_model_states.pt", f"{_SAVE}/averaged_weights/.metadata"),
        f"{_SAVE}/model.safetensors",
    ],
}
FOREIGN = ["notes.txt", "plots/a.png", ".hidden", "data.pt"]


def _fill(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{folder.name}/{name}")
    return folder


def _content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_are_replaced(kind: str, by_file: bool, tmp_path: Path) -> None:
    check_replaceable(tmp_path / "missing", by_file=by_file)
    (tmp_path / "empty").mkdir()
    if by_file:
        with pytest.raises(IsADirectoryError, match="It holds nothing"):
            check_replaceable(tmp_path / "empty", by_file=True)
    else:
        check_replaceable(tmp_path / "empty")
    folder = _fill(tmp_path / "last", CHECKPOINTS[kind])
    assert files_of_others(folder) == []
    check_replaceable(folder, by_file=by_file)
    (tmp_path / "link").symlink_to(folder)
    check_replaceable(tmp_path / "link", by_file=by_file)


@pytest.mark.parametrize(
    "names",
    [
        ["data.csv"],
        ["meta.pt"],
        ["latest", "global_step100/mp_rank_00_model_states.pt"],
        ["checkpoint/a.txt"],
        _DCP[1:],
    ],
)
def test_other_folders_are_not(names: list[str], tmp_path: Path) -> None:
    folder = _fill(tmp_path / "last", names)
    for by_file in (False, True):
        with pytest.raises(IsADirectoryError, match="last is a folder but not a checkpoint: it is not overwritten"):
            check_replaceable(folder, by_file=by_file)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "table"
    file.write_text("1,2")
    check_replaceable(file, by_file=True)
    with pytest.raises(FileExistsError, match="table is a file but not a checkpoint: it is not overwritten"):
        check_replaceable(file)
    buffer = io.BytesIO()
    torch.save({}, buffer)
    for content in (b"", buffer.getvalue()):
        file.write_bytes(content)
        check_replaceable(file)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_what_is_no_checkpoints_stays(kind: str, tmp_path: Path) -> None:
    old, new = _fill(tmp_path / "last", CHECKPOINTS[kind] + FOREIGN), _fill(tmp_path / "new", CHECKPOINTS["dcp"])
    (old / "link").symlink_to("nowhere")
    assert files_of_others(old) == sorted([".hidden", "data.pt", "link", "notes.txt", "plots"])
    with pytest.raises(IsADirectoryError, match=r"with a checkpoint and \.hidden, data\.pt, link and 2 more"):
        check_replaceable(old, by_file=True)
    expected = {name: f"last/{name}" for name in FOREIGN}
    keep_files_of_others(old, new)
    assert _content(old) == {name: f"last/{name}" for name in CHECKPOINTS[kind] + FOREIGN}
    atomic.replace(old, new)
    assert _content(old) == expected | {name: f"new/{name}" for name in CHECKPOINTS["dcp"]}
    assert (old / "link").is_symlink()
    atomic.remove_folder(old)
    assert _content(old) == expected


def test_inside_deepspeeds_folder_and_under_a_name_that_is_taken(tmp_path: Path) -> None:
    old = _fill(tmp_path / "last", [*_STAGE_2, "checkpoint/notes.txt", "accelight.json"])
    keep_files_of_others(old, _fill(tmp_path / "new", _DCP))
    assert _content(tmp_path / "new")["checkpoint.notes.txt.kept"] == "last/checkpoint/notes.txt"
    atomic.remove_folder(old)
    assert _content(old) == {"checkpoint/notes.txt": "last/checkpoint/notes.txt"}
    mine = _fill(tmp_path / "mine", [*_DCP, "latest"])
    keep_files_of_others(mine, _fill(tmp_path / "other", _STAGE_2))
    assert _content(tmp_path / "other")["latest.kept"] == "mine/latest"


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    keep_files_of_others(_fill(tmp_path / "last", _DCP + FOREIGN), _fill(tmp_path / "new", _DCP))
    assert _content(tmp_path / "new")["plots/a.png"] == "last/plots/a.png"
