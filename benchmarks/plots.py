"""Draw what benchmarks have kept: ``python -m benchmarks.plots [NAME ...]`` writes SVG files into ``docs/plots``.

Bars are medians, lines their intervals of 95 %; a timeline has a panel for each engine. Machine and versions stand
below.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import paired, results

_FOLDER = Path(__file__).parents[1] / "docs" / "plots"
_OURS, _PEER = "#1b6ca8", "#b8b8b8"
Bars = Sequence[tuple[str, paired.Interval]]


def _overhead(kept: Mapping[str, Any]) -> dict[str, Bars]:
    return {
        f"Added to a hand-written step, ms ({number} process{'es' if number != '1' else ''})": [
            (
                kind if base == "FSDP2 by hand" else f"{kind}, to {base}",
                paired.difference(found["seconds_per_step"], kind, base),
            )
            for kind, base in kept["added_to"].items()
        ]
        for number, found in kept["processes"].items()
    }


def _trigger(kept: Mapping[str, Any]) -> dict[str, Bars]:
    return {
        f"Added by checking a trigger, ms ({name})": [
            (check, paired.difference(rounds, check, "no check")) for check in rounds if check != "no check"
        ]
        for name, rounds in kept["seconds_per_step"].items()
    }


def _save(kept: Mapping[str, Any]) -> dict[str, Bars]:
    size = f"{kept['bytes_of_weights'] / 1e9:g} GB of weights, {kept['processes']} processes"
    return {
        f"Training stands still for a save, ms ({engine}, {size})": [
            (name.removeprefix(f"{engine} "), paired.median_of(kept["seconds"], name))
            for name in kept["seconds"]
            if name.startswith(engine)
        ]
        for engine in ("fsdp1", "fsdp2")
    }


def _panels(kept: Mapping[str, Any]) -> dict[str, Bars]:
    return {
        f"{title}, ms": [(side, paired.median_of({side: seconds}, side)) for side, seconds in sides.items()]
        for title, sides in kept["panels"].items()
    }


PLOTS: dict[str, Callable[[Mapping[str, Any]], dict[str, Bars]]] = {
    "accumulate": _panels,
    "import": _panels,
    "load-full": _panels,
    "merge": _panels,
    "merge-background": _panels,
    "merge-small": _panels,
    "merge-zero": _panels,
    "optimizer": _panels,
    "overhead": _overhead,
    "save": _save,
    "trigger": _trigger,
}


def draw(name: str, folder: Path) -> Path:
    """Draw what a benchmark has kept, and return the file.

    Raises:
        FileNotFoundError: If it has kept nothing.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": name, "font.size": 9})  # the same file from the same numbers
    from matplotlib import pyplot

    kept = results.kept(name)
    figure = _FIGURES[name](kept)
    versions = ", ".join(f"{package} {version}" for package, version in kept["versions"].items())
    machine = kept["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, {kept['date']}"
    figure.supxlabel(f"{where}\n{versions}", fontsize=6, color="#666666")
    path = folder / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _draw_panels(panels_of: Callable[[Mapping[str, Any]], dict[str, Bars]], kept: Mapping[str, Any]) -> Any:
    from matplotlib import pyplot

    panels = panels_of(kept)
    heights = [0.6 + 0.28 * len(bars) for bars in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels), figsize=(8, sum(heights) + 0.5), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, (title, bars) in zip(axes.flat, panels.items(), strict=True):
        _draw_bars(axis, title, bars)
    return figure


def _draw_bars(axis: Any, title: str, bars: Bars) -> None:
    for place, (name, found) in enumerate(bars):
        ours = name.startswith(("accelight", "sharded", "async_save", "save_safetensors"))
        low, median, high = (value * 1000 for value in (found.low, found.median, found.high))
        axis.barh(place, median, color=_OURS if ours else _PEER)
        axis.plot([low, high], [place, place], color="black", linewidth=1)
        axis.annotate(
            f" {median:.0f}" if median >= 100 else f" {median:.3g}", (max(high, 0), place), va="center", fontsize=8
        )
    axis.set_yticks(range(len(bars)), [name for name, _ in bars])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_title(title, loc="left", fontsize=9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


_KINDS = {  # the colour, and whether the words on it are white
    "forward": ("#56b4e9", False),
    "backward": ("#0072b2", True),
    "optimizer": ("#009e73", True),
    "all-gather": ("#f0c808", False),
    "reduce-scatter": ("#d55e00", True),
    "all-reduce": ("#cc79a7", False),
    "message": ("#8a8f98", False),
}


def _draw_timeline(kept: Mapping[str, Any]) -> Any:
    """Draw two lanes for each engine, with the number of a unit on each of its bars."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    engines = kept["engines"]
    figure, axes = pyplot.subplots(len(engines), figsize=(10, 1.35 * len(engines) + 1.1), layout="constrained")
    for axis, (engine, events) in zip(axes, engines.items(), strict=True):
        for each in events:
            computes = each["kind"] in ("forward", "backward", "optimizer")
            color, is_dark = _KINDS[each["kind"]]
            length = each["end_ms"] - each["start_ms"]
            axis.barh(
                1 if computes else 0, length, 0.8, each["start_ms"], color=color, edgecolor="white", linewidth=0.4
            )
            word = {"": "", "rest of the root": "r"}.get(each["unit"], each["unit"].removeprefix("block "))
            if word and length > max(one["end_ms"] for one in events) / 120:
                where = (each["start_ms"] + length / 2, 1 if computes else 0)
                axis.annotate(word, where, ha="center", va="center", fontsize=7, color="white" if is_dark else "black")
        axis.set_yticks([1, 0], ["computes", "communicates"])
        axis.set_xlim(0, max(each["end_ms"] for each in events))
        axis.set_title(f"{engine}, ms", loc="left", fontsize=9)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    found = {each["kind"] for events in engines.values() for each in events}
    handles = [Patch(color=color, label=kind) for kind, (color, _) in _KINDS.items() if kind in found]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


_FIGURES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **{name: partial(_draw_panels, panels_of) for name, panels_of in PLOTS.items()},
    "timeline": _draw_timeline,
}
"""What `draw` knows."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(_FIGURES)}; default all that are kept")
    names = parser.parse_args().names or [name for name in _FIGURES if results.is_kept(name)]
    if unknown := [name for name in names if name not in _FIGURES]:
        parser.error(f"there is no plot of {', '.join(unknown)}; there are {', '.join(_FIGURES)}")
    for name in names:
        print(draw(name, _FOLDER))


if __name__ == "__main__":
    main()
