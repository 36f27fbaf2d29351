"""A costlier model with the same outputs: layers that compute everything and add nothing."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

__all__ = ["deepen"]


def deepen(model: LlamaForCausalLM, extra_layers: int) -> LlamaForCausalLM:
    """A copy of `model` with `extra_layers` decoder layers appended, and exactly the same logits.

    Each appended layer is a copy of one of the model's own whose two output projections are zero, so that it adds
    0 to the residual stream: x + o_proj(...) = x + 0 and x + down_proj(...) = x + 0.
    """
    import torch

    deep = copy.deepcopy(model)
    layers = deep.model.layers
    own = len(layers)
    for n in range(extra_layers):
        layer = copy.deepcopy(layers[n % own])
        with torch.no_grad():
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                for parameter in projection.parameters():
                    parameter.zero_()
        layer.self_attn.layer_idx = own + n
        layers.append(layer)
    deep.config.num_hidden_layers = len(layers)
    return deep
