"""Will a draft token be accepted? Logistic models that learn while serving."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Logistic"]

PRECISION = 4.0
FORGETTING = 0.998
DAMPING = 0.5
LEAST_CURVATURE = 0.02


class Logistic:
    """Online logistic regression by damped Newton steps: A <- .998 A + sum h x x^T, w += (A + .5 I)^-1 sum (y - p) x.

    h = max(.02, p (1 - p)). prior: [F], the weights before any data; A starts at 4 I.
    """

    def __init__(self, prior: Tensor) -> None:
        self.weights = prior.double().clone()
        self._curvature = PRECISION * torch.eye(prior.numel(), dtype=torch.float64)
        self._damping = DAMPING * torch.eye(prior.numel(), dtype=torch.float64)

    def predict(self, features: Tensor) -> Tensor:
        """Probability of each row of features [..., F]."""
        return torch.sigmoid(features @ self.weights)

    def learn(self, features: Tensor, labels: Tensor, weight: Tensor, steps: int = 1) -> None:
        """Take rows [N, F] with labels [N] in 0..1 and weights [N] in 0..1, gathered over `steps` decoding steps."""
        p = self.predict(features)
        scaled = features * (weight * (p * (1.0 - p)).clamp_(min=LEAST_CURVATURE)).unsqueeze(1)
        self._curvature.mul_(FORGETTING**steps).addmm_(scaled.t(), features)
        gradient = features.t() @ (weight * (labels - p))
        self.weights += torch.linalg.solve(self._curvature + self._damping, gradient)
