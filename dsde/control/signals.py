"""The signals of DSDE (arXiv 2509.01083) over KLD histories, as pure functions; nothing here keeps state.

The KLDs themselves are measured where the distributions are, by `dsde.engine.signals`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsde.control.arrays import Floats, Ints

__all__ = ["FLOOR", "scale_factor", "weighted_variance", "wvir"]

FLOOR = 1e-8
"""Keeps a denominator from being 0."""


def weighted_variance(values: Floats, counts: Ints, decay: float) -> Floats:
    """Var_w of the newest entries of each row: weight decay**age, mean and variance weighted alike; [B].

    values: [B, W], newest last: the last column has age 0. counts: [B] int64, how many of the last columns are valid,
    at most W; the others must be finite and have weight 0. 0 where fewer than two are valid.
    """
    weight = _weights(values.shape[1], decay).take(counts, 0)
    deviation = values - np.vecdot(weight, values)[:, None]
    deviation *= deviation
    variance: Floats = np.vecdot(weight, deviation)
    return variance


@lru_cache(maxsize=64)
def _weights(window: int, decay: float) -> Floats:
    """[window + 1, window]: row n holds the weights, of sum 1, for n valid entries; row 0 is 0."""
    age = np.arange(window - 1, -1, -1)
    valid = age < np.arange(window + 1)[:, None]
    weight = np.where(valid, float(decay) ** age, 0.0)
    return weight / np.maximum(weight.sum(axis=1, keepdims=True), FLOOR)


def wvir(short: Floats, long: Floats, eps: float = FLOOR) -> Floats:
    """Weighted-variance intensity ratio Var_w(short window) / (Var_w(long window) + eps), [B]; above 1: growing."""
    return short / (long + eps)


@np.errstate(over="ignore")
def scale_factor(kld_last: Floats) -> Floats:
    """SF = exp(2 * mu_KLD,last) - 1, [B], of the mean KLD of each sequence's latest verification step."""
    return np.expm1(2.0 * kld_last)
