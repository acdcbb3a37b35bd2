"""Differences between sides that were measured in turn, with confidence intervals by bootstrap.

What a machine does beside hits all sides of a round alike: each side is compared with those of its own round, and whole
rounds are drawn anew. An interval of 95 % that is wider than what one wants to claim says that more rounds are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

_RESAMPLES = 4000
_CONFIDENCE = 0.95
Values = NDArray[numpy.float64]
Rounds = Mapping[str, Sequence[float]]
"""Seconds by side, the same number of each; those at one place were measured in one round."""


@dataclass(frozen=True)
class Interval:
    """A median with its confidence interval."""

    low: float
    median: float
    high: float

    def in_ms(self) -> str:
        """Return it in milliseconds, from seconds."""
        low, median, high = (f"{value * 1000:.3f}" for value in (self.low, self.median, self.high))
        return f"{median} ms ({low} to {high})"

    def __str__(self) -> str:
        """Return it as a plain number."""
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def median_of(rounds: Rounds, side: str) -> Interval:
    """Return what a side takes."""
    return _interval(rounds, lambda drawn: numpy.median(drawn[side], axis=-1))


def difference(rounds: Rounds, side: str, base: str) -> Interval:
    """Return what a side takes more than another."""
    return _interval(rounds, lambda drawn: _added(drawn, side, base))


def difference_of_added(rounds: Rounds, one: tuple[str, str], other: tuple[str, str]) -> Interval:
    """Return what a side adds to its base more than another side adds to its own; both are ``(side, base)``."""
    return _interval(rounds, lambda drawn: _added(drawn, *one) - _added(drawn, *other))


def ratio(rounds: Rounds, side: str, peer: str) -> Interval:
    """Return what a side takes in terms of another."""
    return _interval(rounds, lambda drawn: numpy.median(drawn[side] / drawn[peer], axis=-1))


def ratio_of_added(rounds: Rounds, side: str, peer: str, base: str) -> Interval | None:
    """Return what a side adds to ``base``, in terms of what a peer adds; None if it is not sure that the peer adds."""
    if difference(rounds, peer, base).low <= 0:
        return None
    return _interval(rounds, lambda drawn: _added(drawn, side, base) / _added(drawn, peer, base))


def _added(drawn: Mapping[str, Values], side: str, base: str) -> Values:
    return numpy.asarray(numpy.median(drawn[side] - drawn[base], axis=-1))


def _interval(rounds: Rounds, statistic: Callable[[Mapping[str, Values]], Values]) -> Interval:
    """Return a statistic over the last axis of all sides, and its percentiles where rounds are drawn anew."""
    sides = {side: numpy.asarray(values, numpy.float64) for side, values in rounds.items()}
    [num_rounds] = {len(values) for values in sides.values()}
    drawn = numpy.random.default_rng(0).integers(num_rounds, size=(_RESAMPLES, num_rounds))
    resampled = statistic({side: values[drawn] for side, values in sides.items()})
    tail = (1 - _CONFIDENCE) / 2
    low, high = numpy.quantile(resampled, (tail, 1 - tail))
    return Interval(float(low), float(statistic(sides)), float(high))
