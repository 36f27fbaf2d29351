"""A draft of chosen quality: the model itself, blurred."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

__all__ = ["perturb"]


def perturb(model: LlamaForCausalLM, noise: float, seed: int) -> LlamaForCausalLM:
    """A copy of `model` with W + noise * RMS(W) * N(0, 1) for every matrix W, embeddings included; vectors stay.

    The same seed gives the same draft. Noise is drawn and added in float32.
    """
    import torch

    blurred = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in blurred.parameters():
            if parameter.ndim == 2:
                matrix = parameter.float()
                scale = noise * matrix.square().mean().sqrt()
                parameter.copy_(matrix + scale * torch.randn(matrix.shape, generator=generator))
    return blurred
