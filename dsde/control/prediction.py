"""Will a draft token be accepted? Logistic models that learn while serving."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsde.control.arrays import ONE, Floats, Numbers

__all__ = ["Logistic", "logit", "sigmoid"]

PRECISION = 4.0
FORGETTING = 0.998
DAMPING = 0.5
LEAST_CURVATURE = 0.02


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x), elementwise; `x` itself becomes the result."""
    np.negative(x, out=x)
    np.exp(x, out=x)
    x += ONE
    return np.reciprocal(x, out=x)


def logit(p: Numbers, eps: float) -> Floats:
    """ln(p / (1 - p)), elementwise, of probabilities brought into eps..1 - eps; NaN stays NaN."""
    low, high = _bounds(eps)
    inside = np.maximum(p, low)
    np.minimum(inside, high, out=inside)
    odds = ONE - inside
    np.divide(inside, odds, out=odds)
    return np.log(odds, out=odds)


@lru_cache(maxsize=8)
def _bounds(eps: float) -> tuple[Floats, Floats]:
    return np.array(eps), np.array(1.0 - eps)


class Logistic:
    """Online logistic regression by damped Newton steps: A <- .998 A + sum h x x^T, w += (A + .5 I)^-1 sum (y - p) x.

    h = max(.02, p (1 - p)). table: [M, F] float64 with a row for each of M models, its weights before any data; this
    one keeps and changes its own `row` there, so that others may read many at once. A starts at 4 I.
    """

    def __init__(self, table: Floats, row: int) -> None:
        self._table = table
        self._row = row
        features = table.shape[1]
        self._curvature = PRECISION * np.eye(features)
        self._damping = DAMPING * np.eye(features)

    @property
    def weights(self) -> Floats:
        """Those learnt so far, [F]."""
        return self._table[self._row]

    def predict(self, features: Floats) -> Floats:
        """Probability of each row of features [..., F]."""
        return sigmoid(features @ self.weights)

    def learn(self, features: Floats, labels: Floats, weight: Floats, steps: int = 1) -> None:
        """Take rows [N, F] with labels [N] in 0..1 and weights [N] in 0..1, gathered over `steps` decoding steps."""
        p = self.predict(features)
        scaled = features * (weight * np.maximum(p * (1.0 - p), LEAST_CURVATURE))[:, None]
        self._curvature *= FORGETTING**steps
        self._curvature += scaled.T @ features
        gradient = (weight * (labels - p)) @ features
        self._table[self._row] += np.linalg.solve(self._curvature + self._damping, gradient)
