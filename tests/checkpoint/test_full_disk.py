"""A disk that takes no more: the error names the output and how much was to be written."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelight.checkpoint.files import translate_full_disk
from tests.checkpoint import damage
from tests.small_disk import fill, small_disk

_LIMITED = """
import resource, sys
from accelight.checkpoint.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("options", [[], ["--unsafe-serialization"]], ids=["safetensors", "bin"])
def test_a_merge_that_the_system_stops(tmp_path: Path, options: list[str]) -> None:
    folder, output = damage.good(tmp_path / "in", a=torch.ones(10_000)), tmp_path / "out"
    command = [sys.executable, "-c", _LIMITED, "merge-weights", str(folder), str(output), *options]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "File too large" in result.stderr
    assert str(output) in result.stderr
    assert not output.exists()


def test_torchs_own_words_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 100_000) as disk:
        fill(disk / "filler", 8192)
        path = disk / "last.pt"
        told = r"about 40\.0 kB were to be written, but there was room for 8\.2 kB"
        with (
            pytest.raises(OSError, match=told) as caught,
            translate_full_disk(path, 40_000),
            path.open("wb") as stream,
        ):
            torch.save(torch.ones(10_000), stream)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert "unexpected pos" in str(caught.value.__cause__)


def test_safetensors_words_on_a_full_disk(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with small_disk(tmp_path / "disk", 100_000) as disk:
        fill(disk / "filler", 8192)
        with (
            pytest.raises(OSError, match="No space left on device: there was room for") as caught,
            translate_full_disk(disk / "model.safetensors"),
        ):
            save_file({"a": torch.ones(10_000)}, disk / "model.safetensors")
        assert caught.value.errno == errno.ENOSPC


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    for error in (ValueError("5"), OSError(errno.EIO, "bad disk"), OSError(errno.ENOSPC, "full", "its own path")):
        with pytest.raises(type(error)) as caught, translate_full_disk(tmp_path):
            raise error
        assert caught.value is error
