"""Where Lightning's tests come from: a checkout, an archive of one, or GitHub."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REPOSITORY = "https://github.com/Lightning-AI/pytorch-lightning"
_TESTS = Path("tests", "tests_pytorch")


@contextmanager
def lightning_source(given: Path | None, version: str) -> Iterator[Path]:
    """Yield the root of a checkout of Lightning; what is unpacked or cloned for it is removed in the end.

    Args:
        given: A checkout, or an archive of one; None clones the release ``version``.
        version: Of the Lightning that is installed.

    Raises:
        FileNotFoundError: If there are no tests in it.
        RuntimeError: If it cannot be cloned.
    """
    if given is not None and given.is_dir():
        yield _root(given)
        return
    with tempfile.TemporaryDirectory(prefix="lightning-source-") as name:
        folder = Path(name)
        if given is None:
            _clone(version, folder / "lightning")
        elif not given.exists():
            raise FileNotFoundError(
                f"--source {given} does not exist. Give a checkout of {_REPOSITORY}, or an archive."
            )
        elif given.suffix == ".zip":
            shutil.unpack_archive(given, folder)
        else:
            shutil.unpack_archive(given, folder, filter="data")
        yield _root(folder)


def release_of(source: Path) -> str | None:
    """Return the version that a checkout says it has; None if it does not say."""
    said = source / "src" / "version.info"
    return said.read_text(encoding="utf-8").strip() if said.exists() else None


def _root(folder: Path) -> Path:
    for root in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if (root / _TESTS).is_dir():
            return root.resolve()
    raise FileNotFoundError(
        f"There is no {_TESTS} in {folder}. Give --source a checkout of {_REPOSITORY}, or an archive of one; packages "
        "from the registry hold no tests."
    )


def _clone(version: str, folder: Path) -> None:
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", version, _REPOSITORY, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed: {done.stderr.strip()}. Where there is no network, give --source a checkout "
            "or an archive of one."
        )
