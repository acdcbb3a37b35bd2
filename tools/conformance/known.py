"""The failures that are known, with the reason for each: a table in ``docs/compatibility.md``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.conformance.plugin import OURS

COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.md"
_ROW = re.compile(r"\| `(?P<test>[^`]+::[^`]+)` \| (?P<where>[^|]+) \| (?P<reason>[^|]+) \|\s*")


@dataclass(frozen=True)
class KnownFailure:
    """A line of the table."""

    test: str
    """Name of a test from ``tests_pytorch`` on; ``*`` stands for anything."""
    where: frozenset[tuple[str, int | None]]
    """Strategies, each with the number of processes that it is about; None for any."""
    reason: str

    def matches(self, test: str) -> bool:
        """Return whether the line is about this test."""
        return re.fullmatch(".*".join(map(re.escape, self.test.split("*"))), test) is not None

    def is_about(self, kind: str, devices: int) -> bool:
        """Return whether the line is about a strategy on so many processes."""
        return (kind, None) in self.where or (kind, devices) in self.where


@dataclass
class Judgement:
    """What the list says of a run."""

    known: dict[tuple[str, str], str]
    """Strategy and test, to the reason on the list."""
    unlisted: dict[tuple[str, str], str]
    """Strategy and test that are not on the list, to what the test says."""
    passing: list[tuple[str, KnownFailure]]
    """Strategies, and lines whose tests all pass now."""


def read_known_failures(path: Path = COMPATIBILITY) -> list[KnownFailure]:
    """Read the table.

    Raises:
        ValueError: If a line names a strategy that there is not.
    """
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = _ROW.fullmatch(line)
        if row is not None:
            where = frozenset(_place(word.strip(), row["test"]) for word in row["where"].split(","))
            found.append(KnownFailure(row["test"], where, row["reason"].strip()))
    return found


def _place(word: str, test: str) -> tuple[str, int | None]:
    kind, _, devices = word.partition(":")
    if kind not in OURS or (devices and not devices.isdigit()):
        raise ValueError(
            f"The list of known failures has {test} with {word!r}. Write one of {', '.join(OURS)}, alone or with the "
            "number of processes (fsdp1:2), separated by commas."
        )
    return kind, int(devices) if devices else None


def judge(
    known: Iterable[KnownFailure], ran: Iterable[str], failed: Mapping[str, Mapping[str, str]], devices: int
) -> Judgement:
    """Compare a run with the list.

    Args:
        known: The list.
        ran: The tests that ran with each of our strategies.
        failed: Strategy to failed tests, with what each says.
        devices: Number of processes.
    """
    lines, tests = list(known), list(ran)
    result = Judgement({}, {}, [])
    for kind, failures in failed.items():
        about = [line for line in lines if line.is_about(kind, devices)]
        for test, why in failures.items():
            reasons = [line.reason for line in about if line.matches(test)]
            if reasons:
                result.known[kind, test] = reasons[0]
            else:
                result.unlisted[kind, test] = why
        for line in about:
            if any(map(line.matches, tests)) and not any(map(line.matches, failures)):
                result.passing.append((kind, line))
    return result
