"""Whose files stand where a checkpoint is to be written: a checkpoint replaces checkpoints, and nothing else.

[Note: files of others] A folder may hold a checkpoint and, beside it, what somebody else has put there. A new
checkpoint of that name takes over what is not the old one's: as links to the same bytes, made before the names are
exchanged, so that there is no moment at which they could be lost.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from pathlib import Path

from ...checkpoint.manifest import MANIFEST_NAME
from ...checkpoint.writing.output import RESULT_NAMES

_NUM_NAMES = 3
_DCP = (re.compile(r"\.metadata(\.tmp)?"), re.compile(r".*\.distcp"), re.compile(r"meta\.pt"))
_LOCAL = (re.compile(r"rank_\d+_of_\d+\.pt"), re.compile(r"meta\.pt"))
_OURS = re.compile(re.escape(MANIFEST_NAME))
_TAG, _CONVERTED = "checkpoint", "checkpoint_universal"
"""DeepSpeed's folders inside a checkpoint of Lightning's or ours, which have the same names in both."""
_DEEPSPEED = (
    *map(re.compile, ("latest", "latest_universal", r"zero_to_\w+\.py")),
    *(re.compile(re.escape(name)) for name in RESULT_NAMES),
)
_IN_TAG = re.compile(r".*_states\.pt")


def check_replaceable(path: Path, *, by_file: bool = False) -> None:
    """Check that nothing is lost when a checkpoint takes this name.

    A folder that is replaced by a folder keeps what is not the checkpoint's, see `keep_files_of_others`.

    Args:
        path: Nothing, an empty folder (not ``by_file``), a checkpoint of torch's, Lightning's, DeepSpeed's or ours, or
            a link to one.
        by_file: Whether a file takes the name. A file replaces any file, as ``torch.save`` does.

    Raises:
        IsADirectoryError: If it is another folder, or (``by_file``) one that holds files beside the checkpoint's.
        FileExistsError: If it is a file that is no checkpoint, and a folder takes the name.
    """
    if path.is_dir():
        names = os.listdir(path)
        if (names or by_file) and not is_checkpoint(path):
            raise IsADirectoryError(
                f"{path} is a folder and no checkpoint: it is not overwritten. It holds {_listed(names) or 'nothing'}. "
                f"Give another name, such as {path / 'last.ckpt'}."
            )
        if by_file and (foreign := files_of_others(path)):
            raise IsADirectoryError(
                f"{path} is a folder with a checkpoint and {_listed(foreign)}: it is not overwritten by a file. Give "
                "another name, or move these away."
            )
    elif path.is_file() and not by_file and not _is_saved_file(path):
        raise FileExistsError(f"{path} is a file and no checkpoint: it is not overwritten. Give another name.")


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a sharded checkpoint: of DCP's, of ``local_state_dict``, or of DeepSpeed's."""
    return bool(_patterns(folder))


def files_of_others(folder: Path) -> list[str]:
    """Return what a checkpoint's folder holds that no checkpoint has, as relative paths."""
    patterns, foreign = _patterns(folder), []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder and entry.name == _TAG and _is_tag_folder(folder):
            foreign += [f"{_TAG}/{name}" for name in sorted(os.listdir(entry.path)) if not _IN_TAG.fullmatch(name)]
        elif is_folder and entry.name in (_CONVERTED, f".{_CONVERTED}.unfinished") and _is_tag_folder(folder):
            continue
        elif is_folder or not any(pattern.fullmatch(entry.name) for pattern in patterns):
            foreign.append(entry.name)
    return foreign


def keep_files_of_others(old: Path, new: Path) -> None:
    """Put what ``old`` holds beside its checkpoint into ``new``, too: see [Note: files of others]."""
    if not old.is_dir() or old.is_symlink() or not is_checkpoint(old):  # of a link, only the link is replaced
        return
    for name in files_of_others(old):
        source, target = old / name, new / name
        if os.path.lexists(target) or not target.parent.is_dir():
            target = new / f"{name.replace('/', '.')}.kept"
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target, symlinks=True, copy_function=_link)
        else:
            _link(str(source), str(target))


def remove_own(folder: Path) -> None:
    """Remove a checkpoint's own files from a folder that holds others; first those without which it is none."""
    foreign = set(files_of_others(folder))
    own = [name for name in os.listdir(folder) if name not in foreign]
    for name in sorted(own, key=lambda name: (name not in (".metadata", "meta.pt", "latest"), name)):
        path = folder / name
        if not path.is_dir() or path.is_symlink():
            path.unlink()
            continue
        kept = {one.removeprefix(f"{name}/") for one in foreign if one.startswith(f"{name}/")}
        if not kept:
            shutil.rmtree(path)
            continue
        for inner in path.iterdir():
            if inner.name not in kept:
                inner.unlink()


def _patterns(folder: Path) -> tuple[re.Pattern[str], ...]:
    """Return what the names of a checkpoint's files look like; nothing if it is none."""
    patterns: tuple[re.Pattern[str], ...] = ()
    if (folder / ".metadata").is_file():
        patterns += _DCP
    if any(_LOCAL[0].fullmatch(name) for name in os.listdir(folder)):
        patterns += _LOCAL
    if _is_tag_folder(folder):
        patterns += _DEEPSPEED
    return (*patterns, _OURS) if patterns else ()


def _is_tag_folder(folder: Path) -> bool:
    tag = folder / _TAG
    return tag.is_dir() and any(_IN_TAG.fullmatch(name) for name in os.listdir(tag))


def _is_saved_file(path: Path) -> bool:
    return path.stat().st_size == 0 or path.suffix == ".ckpt" or zipfile.is_zipfile(path)  # torch.save writes a zip


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_NUM_NAMES])
    return shown + (f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else "")
