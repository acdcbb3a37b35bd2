"""``python -m tools.clients_cases.worker CASE STRATEGY share|copy FOLDER``: one cell of the table, in each process.

``plain`` writes what one process trains; any other strategy is compared with that. With ``share`` each process trains
on its part of each batch, with ``copy`` all on the same. Each process writes its outcome as
``STRATEGY.RANK.json``: the differences, or the error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

GLOBAL_BATCH, NUM_STEPS = 8, 5


def main() -> int:
    """Run the cell."""
    name, strategy, data, folder = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
    rank = int(os.environ.get("RANK", "0"))
    outcome: dict[str, Any] = {}
    try:
        outcome = _run(name, strategy, data == "share", folder)
    except Exception as error:  # noqa: BLE001 (it is what the cell shows)
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        outcome = {"error": lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"}
        traceback.print_exc()
    (folder / f"{strategy}.{rank}.json").write_text(json.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in outcome else 0)  # a process that failed alone must not wait for the others


def _run(name: str, strategy: str, shares_data: bool, folder: Path) -> dict[str, Any]:
    case = importlib.import_module(f"tools.clients_cases.{name}")  # first: accelight follows the Lightning it imports

    import torch

    from tools.clients_cases.recording import Recorder, compare

    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(1)
    recorder = Recorder(folder, strategy)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": num_processes,
        "strategy": _strategy(strategy),
        "max_steps": NUM_STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "callbacks": [recorder],
    }
    case.fit(options, GLOBAL_BATCH // (num_processes if shares_data else 1))
    return {} if strategy == "plain" else compare(folder, strategy)


def _strategy(name: str) -> Any:
    if name == "plain":
        return "auto"
    from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

    number = int(name[-1])
    if name.startswith("zero"):
        return AccelDeepSpeedStrategy(zero_stage=number)
    return AccelFSDPStrategy(
        fsdp_version=number,
        auto_wrap_policy="size_based_wrap",
        min_num_params=200,
        state_dict_type="sharded_state_dict",
    )


if __name__ == "__main__":
    sys.exit(main())
