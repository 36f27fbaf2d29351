"""The equations of DSDE against numbers worked by hand."""

import math

import numpy as np
import pytest

from dsde.control.signals import scale_factor, weighted_variance, wvir


def test_weighted_variance_weighs_the_newest_most() -> None:
    # Weights .25 .5 1 (sum 1.75): mean (.25 + 1 + 4) / 1.75 = 3, variance (.25 4 + .5 1 + 1 1) / 1.75 = 10/7.
    values = np.array([[1.0, 2.0, 4.0], [9.0, 4.0, 2.0], [9.0, 9.0, 5.0], [7.0, 7.0, 7.0], [1.0, 2.0, 3.0]])
    # Row 1, the last two: weights .5 1, mean (2 + 2) / 1.5 = 8/3, variance (.5 16/9 + 4/9) / 1.5 = 8/9.
    counts = np.array([3, 2, 1, 3, 0])
    assert weighted_variance(values, counts, 0.5).tolist() == pytest.approx([10 / 7, 8 / 9, 0.0, 0.0, 0.0])


def test_weighted_variance_of_equal_values_is_exactly_zero_enough_for_eps() -> None:
    values = np.full((1, 30), 0.1)
    assert weighted_variance(values, np.array([30]), 0.85).item() < 1e-30


def test_wvir() -> None:
    # 2 / (4 + 1e-8) and 0 / (0 + 1e-8).
    ratio = wvir(np.array([2.0, 0.0]), np.array([4.0, 0.0]))
    assert ratio.tolist() == pytest.approx([0.5, 0.0], abs=1e-7)


def test_scale_factor() -> None:
    # exp(0) - 1, exp(2 * .25) - 1, exp(ln 2) - 1.
    factor = scale_factor(np.array([0.0, 0.25, math.log(2.0) / 2.0]))
    assert factor.tolist() == pytest.approx([0.0, 0.648721, 1.0], abs=1e-6)
