"""DeepSpeed's universal checkpoints: the same state for any number of ranks.

``python -m accelight.strategies.deepspeed.universal CHECKPOINT`` converts by hand what ``load_universal=True``
converts automatically.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .safe_loading import reading_safely

TAG, FOLDER, LATEST = "checkpoint", "checkpoint_universal", "latest_universal"


def is_converted(checkpoint: Path) -> bool:
    """Whether the universal form of a checkpoint is there, and complete."""
    return (checkpoint / LATEST).is_file()


def convert(checkpoint: Path) -> None:
    """Write the universal form of a checkpoint into it, in a process of its own.

    Raises:
        RuntimeError: If the conversion fails; the message has its output.
    """
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{checkpoint} could not be converted to DeepSpeed's universal form:\n{done.stdout[-2000:]}"
            f"{done.stderr[-4000:]}"
        )


def _convert_here(checkpoint: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    unfinished = checkpoint / f".{FOLDER}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed run
    arguments = argparse.Namespace(
        input_folder=str(checkpoint / TAG),
        output_folder=str(unfinished / FOLDER),  # beside it, DeepSpeed notes what is the latest
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with reading_safely():
            ds_to_universal.main(arguments)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # what fails on a full disk must not keep it full
        raise
    shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)
    (unfinished / FOLDER).rename(checkpoint / FOLDER)
    (unfinished / LATEST).rename(checkpoint / LATEST)
    unfinished.rmdir()


def main() -> None:
    """Convert the checkpoint that the command line names."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _convert_here(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
