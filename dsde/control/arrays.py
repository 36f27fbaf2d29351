"""Array types of the control layer, and tables that its steps look things up in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ONE", "Bools", "Floats", "Ints", "Numbers", "first_slots"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Numbers = NDArray[np.float32] | NDArray[np.float64]
"""Measurements arrive in single precision; sums over them are kept in double."""

ONE: Floats = np.array(1.0)
"""As an array: on small arrays numpy takes longer to convert a number than to compute with it."""


def first_slots(length: int) -> Floats:
    """[length + 1, length]: row n is 1 in its first n slots, 0 in the others."""
    return np.tri(length + 1, length, -1)
