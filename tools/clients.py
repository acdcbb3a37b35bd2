"""``python -m tools.clients``: train models of libraries built on Lightning under every strategy, beside one process.

Each library is installed into an environment of its own, and a small model of it is trained for a few steps: by one
process without a strategy of accelight, and by two CPU processes under each strategy. The table says whether losses and
weights are the same. They are equal up to `TOLERANCE`: weights relative to the largest change that training made to any
of them, losses relative to themselves. What differs or fails is an exit status of 1, unless ``KNOWN`` has the reason.

The environment takes some gigabytes and the network; nothing is downloaded by the models.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STRATEGIES = ("fsdp1", "fsdp2", "zero2", "zero3")
TOLERANCE = 1e-3
"""Sums in another order differ by some 1e-7 of the weights, and a few small steps change weights by a thousandth."""
CELL_S = 600.0
_PINNED = re.compile(
    r"(torch|lightning|pytorch-lightning|lightning-utilities|torchmetrics|deepspeed|ninja|safetensors|transformers|"
    r"tokenizers|accelerate)=="
)
"""What the tests of accelight pin is pinned here; libraries choose the rest. A torch of pip's choice brings CUDA."""


@dataclass(frozen=True)
class Library:
    """A row of the table."""

    requirement: str
    """For pip."""
    what: str
    """Library and model."""
    shares_data: bool = True
    """Whether each process has its share of a batch; else all have the same, as where a library draws at random."""


LIBRARIES = {
    "nbeats": Library("pytorch-forecasting", "pytorch-forecasting: N-BEATS"),
    "tft": Library("pytorch-forecasting", "pytorch-forecasting: Temporal Fusion Transformer"),
    "neural": Library("neuralforecast", "neuralforecast (on `pytorch_lightning`): N-HiTS", shares_data=False),
    "molecules": Library("chemprop", "chemprop: message passing over molecules"),
    "images": Library("monai", "MONAI: U-Net"),
    "cells": Library("scvi-tools>=1.4", "scvi-tools: autoencoder of single cells", shares_data=False),
    "language": Library("peft", "transformers and PEFT: LoRA of a Llama"),
}
_NO_BATCH_SIZE = (
    "scvi-tools' loaders have no batch size of their own, and its users have to set train_micro_batch_size_per_gpu in "
    "the DeepSpeed config, as the error says"
)
KNOWN: dict[tuple[str, str], str] = {("cells", "zero2"): _NO_BATCH_SIZE, ("cells", "zero3"): _NO_BATCH_SIZE}
"""Cells that fail, with the reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a cell fails that is not known to."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.clients",
        description="Train models of libraries built on Lightning under accelight's strategies, beside one process.",
        epilog="Models: " + "; ".join(f"{name} ({library.what})" for name, library in LIBRARIES.items()),
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "accelight", "clients")
    parser.add_argument("names", nargs="*", metavar="MODEL", help="which models; all by default")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="one or more; all by default")
    parser.add_argument(
        "--env", type=Path, default=cache, help="environment, made where missing (default: %(default)s)"
    )
    parser.add_argument("--no-install", action="store_true", help="the environment has everything already")
    parser.add_argument("--logs", type=Path, help="where to keep what each cell printed and left")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in LIBRARIES]
    if unknown:
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(LIBRARIES)}")
    names, strategies = options.names or list(LIBRARIES), options.strategy or list(STRATEGIES)
    if not options.no_install:
        install(options.env, [LIBRARIES[name].requirement for name in names])
    with tempfile.TemporaryDirectory() as scratch:
        table = {name: _row(name, strategies, options.env, (options.logs or Path(scratch)) / name) for name in names}
    print(markdown(table, strategies))
    failed = [(name, one) for name, row in table.items() for one, cell in row.items() if not cell.startswith("same")]
    return int(any(cell not in KNOWN for cell in failed))


def install(env: Path, requirements: Iterable[str]) -> None:
    """Make the environment, with torch as it is pinned, and put the libraries into it."""
    _say(f"installing into {env}")
    if not (env / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if _PINNED.match(line)]
    constraints = env / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--quiet", "--prefer-binary", "-c", str(constraints)]
    subprocess.run([*pip, torch], check=True)  # alone and first: what follows finds it there
    subprocess.run([*pip, torch, "lightning", "deepspeed", "ninja", "safetensors"], check=True)
    for requirement in dict.fromkeys(requirements):  # one by one: each may want another pandas, and works with either
        subprocess.run([*pip, torch, requirement], check=True)


def _row(name: str, strategies: Sequence[str], env: Path, folder: Path) -> dict[str, str]:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    reference = _cell(name, "plain", env, folder)
    row = {}
    for strategy in strategies:
        row[strategy] = _cell(name, strategy, env, folder) if reference == "trained" else f"one process: {reference}"
    return row


def _cell(name: str, strategy: str, env: Path, folder: Path) -> str:
    """Train, and return what the table says of it."""
    python = str(env / "bin" / "python")
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    command = [python, *([] if strategy == "plain" else torchrun), "-m", "tools.clients_cases.worker"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / ".types"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(env / "torch_extensions"),  # of this torch and this DeepSpeed
        "HF_HUB_OFFLINE": "1",
    }
    share = "share" if LIBRARIES[name].shares_data else "copy"
    with (folder / f"{strategy}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, name, strategy, share, str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(CELL_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its processes
            process.wait()
            return _told(name, strategy, f"not ended after {CELL_S:.0f} s")
    outcomes = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{strategy}.[0-9].json"))]
    return _told(name, strategy, verdict(outcomes, process.returncode))


def verdict(outcomes: Sequence[dict[str, object]], status: int) -> str:
    """Return a cell: ``same``, or what differs or went wrong.

    Args:
        outcomes: What each process wrote.
        status: Of the command.
    """
    errors = [str(outcome["error"]) for outcome in outcomes if "error" in outcome]
    if errors:
        return errors[0]
    if status or not outcomes:
        return f"ended with status {status}"
    differences = [value for outcome in outcomes for value in outcome.values() if isinstance(value, float)]
    if not differences:
        return "trained"
    largest = max(differences)
    return f"same ({largest:.0e})" if largest <= TOLERANCE else f"differs by {largest:.2g}"


def markdown(table: dict[str, dict[str, str]], strategies: Sequence[str]) -> str:
    """Return the table, with the reasons of what is known to fail below."""
    lines = [f"| library: model | {' | '.join(strategies)} |", "| --- |" + " --- |" * len(strategies)]
    notes: list[str] = []
    for name, row in table.items():
        cells = []
        for strategy, cell in row.items():
            known = "" if cell.startswith("same") else KNOWN.get((name, strategy), "")
            if known and known not in notes:
                notes.append(known)
            cells.append(cell.replace("|", "\\|") + (f" [{notes.index(known) + 1}]" if known else ""))
        lines.append(f"| {LIBRARIES[name].what} | {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"\n[{number}] {note}" for number, note in enumerate(notes, 1))])


def _told(name: str, strategy: str, cell: str) -> str:
    _say(f"{name} {strategy}: {cell}")
    return cell


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
