"""Whether a resume compares what it reads with the checksums beside it."""

from __future__ import annotations

import os

from ...state.truth_values import flag_from_env

_VARIABLE = "ACCELIGHT_CHECK"


def bytes_are_checked() -> bool:
    """Return False where ``ACCELIGHT_CHECK=0`` says that a resume shall not read every byte for its checksum.

    Raises:
        ValueError: If it is no truth value.
    """
    return flag_from_env({_VARIABLE: os.environ.get(_VARIABLE) or "1"}, _VARIABLE)
