"""How yes and no are spelled, in environment variables and in arguments."""

from __future__ import annotations

from collections.abc import Mapping

TRUTH_VALUES: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}
"""In lower case. Source: accelerate 1.15 ``utils/environment.py`` (``str_to_bool``)."""


def flag_from_env(env: Mapping[str, str], name: str) -> bool:
    """Return whether a variable says yes; unset or empty says no.

    Raises:
        ValueError: If it says neither.
    """
    text = env.get(name, "").lower()
    if text and text not in TRUTH_VALUES:
        raise ValueError(f"{name}={env[name]!r} is neither true nor false. Use 1 or 0.")
    return bool(text) and TRUTH_VALUES[text]
