"""DeepSpeed's universal checkpoints: the same state for any number of ranks.

``python -m accelight.strategies.deepspeed.universal CHECKPOINT`` converts one, as ``load_universal=True`` does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..common.modules import is_extra_state
from ..upstream.patches import Patches

TAG, FOLDER, LATEST = "checkpoint", "checkpoint_universal", "latest_universal"
_REFUSED = 3
"""Exit status where the reason is the last line."""


def is_converted(checkpoint: Path) -> bool:
    """Whether the universal form of a checkpoint is there, and complete."""
    return (checkpoint / LATEST).is_file()


def convert(checkpoint: Path, tag: str, *, weights_only: bool = True) -> None:
    """Write the universal form of a checkpoint into it, in a process of its own.

    Args:
        checkpoint: The folder.
        tag: The one in it with DeepSpeed's files.
        weights_only: False reads anything, whatever it may execute.

    Raises:
        ValueError: If its optimizer is none that DeepSpeed converts.
        RuntimeError: If the conversion fails; the message has its output.
    """
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(checkpoint), tag]
    done = subprocess.run(
        [*command, *([] if weights_only else ["--trust"])], capture_output=True, text=True, check=False
    )
    if done.returncode == _REFUSED:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(
            f"{checkpoint} could not be converted to DeepSpeed's universal form:\n{done.stdout[-2000:]}"
            f"{done.stderr[-4000:]}"
        )


@contextmanager
def _without_extra_states() -> Iterator[None]:
    """Hide them from DeepSpeed 0.19, which takes them for weights; they are loaded from where they were saved."""
    load = torch.load

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        state = load(*args, **kwargs)
        weights: Any = state.get("module") if isinstance(state, dict) else None
        if isinstance(weights, dict):
            for name in filter(is_extra_state, list(weights)):
                del weights[name]
        return state

    with Patches("ZeRO files") as patches:
        patches.put(torch, "load", load_weights)
        yield


def _convert_here(checkpoint: Path, tag: str, *, weights_only: bool) -> None:
    from deepspeed.checkpoint import ds_to_universal

    unfinished = checkpoint / f".{FOLDER}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed run
    arguments = argparse.Namespace(
        input_folder=str(checkpoint / tag),
        output_folder=str(unfinished / FOLDER),  # beside it, DeepSpeed notes what is the latest
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with reading_safely(weights_only), _without_extra_states():
            ds_to_universal.main(arguments)
    except KeyError as error:  # of stages 1 to 3 alike
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ValueError(
            "DeepSpeed converts the states of Adam and AdamW (exp_avg, exp_avg_sq) and of no other optimizer; "
            f"{error} is missing. Resume with the number of processes that saved it, or merge the weights "
            "(merge_fsdp_weights), load them into the module and start with a new optimizer."
        ) from None
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # what fails on a full disk must not keep it full
        raise
    shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)
    (unfinished / FOLDER).rename(checkpoint / FOLDER)
    (unfinished / LATEST).rename(checkpoint / LATEST)
    unfinished.rmdir()


def main() -> None:
    """Convert the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description="Write the universal form of a DeepSpeed checkpoint into it.")
    parser.add_argument("checkpoint", type=Path, help="the folder")
    parser.add_argument("tag", nargs="?", default=TAG, help="the one in it with DeepSpeed's files")
    parser.add_argument("--trust", action="store_true", help="read any object, which may run code")
    given = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        _convert_here(given.checkpoint, given.tag, weights_only=not given.trust)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(_REFUSED)


# ------------------------------------------------------------------------------------------------
# Reading DeepSpeed's checkpoints without executing them; DeepSpeed itself unpickles anything.


_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_CLASSES = (  # what DeepSpeed 0.16 to 0.19 writes beside tensors and plain values
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def _classes() -> list[Any]:
    found = (path.rpartition(".") for path in _CLASSES)
    return [getattr(importlib.import_module(module), name) for module, _, name in found]


@contextmanager
def reading_safely(weights_only: bool | None = None) -> Iterator[None]:
    """Restrict ``torch.load`` inside this context to tensors, plain values and DeepSpeed's own records.

    Args:
        weights_only: False reads anything, as DeepSpeed does: for checkpoints that one trusts.

    Raises:
        RuntimeError: If a file holds something else.
    """
    if weights_only is False:
        yield
        return
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_classes()):
            yield
    except pickle.UnpicklingError as error:
        raise RuntimeError(
            "The checkpoint holds objects that can run code when they are read. If you trust it, use "
            f"fit(weights_only=False) or AccelDeepSpeedStrategy(weights_only=False). torch says: {error}"
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


if __name__ == "__main__":
    main()
