"""What a benchmark measured, kept as JSON: the rounds, the machine and the versions, for plots and for comparisons.

``ACCELIGHT_BENCH_RESULTS`` names another folder than ``benchmarks/results``.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Panels = Mapping[str, Mapping[str, Sequence[float]]]
"""By title, the seconds that each side took."""
VARIABLE = "ACCELIGHT_BENCH_RESULTS"
_FOLDER = Path(__file__).parent / "results"
_PACKAGES = ("accelight", "torch", "lightning", "deepspeed", "accelerate", "transformers", "safetensors")


def folder() -> Path:
    """Return where results are."""
    return Path(os.environ.get(VARIABLE) or _FOLDER)


def keep(name: str, what: Mapping[str, Any]) -> Path:
    """Write what a benchmark measured beside where and with what, and return the file."""
    path = folder() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": name, **_circumstances(), **what}, indent=1) + "\n", encoding="utf-8")
    print(f"  kept in {path}")
    return path


def keep_panels(name: str, panels: Panels, **more: Any) -> Path:
    """Keep what is drawn as it is: a panel for each title."""
    return keep(name, {**more, "panels": panels})


def is_kept(name: str) -> bool:
    """Return whether a benchmark has kept something."""
    return (folder() / f"{name}.json").is_file()


def kept(name: str) -> dict[str, Any]:
    """Return what was measured last.

    Raises:
        FileNotFoundError: If nothing was.
    """
    content: dict[str, Any] = json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
    return content


def _circumstances() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0],
        },
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
