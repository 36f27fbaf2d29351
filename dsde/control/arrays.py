"""Array types of the control layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Floats", "Ints", "Numbers"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Numbers = NDArray[np.float32] | NDArray[np.float64]
"""Measurements arrive in single precision; sums over them are kept in double."""
