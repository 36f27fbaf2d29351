from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from dsde.models.perturb import perturb


def test_the_same_seed_gives_the_same_draft(tiny_llama: LlamaForCausalLM) -> None:
    first, again, other = (perturb(tiny_llama, 0.1, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_is_relative_to_each_matrix(tiny_llama: LlamaForCausalLM, noise: float) -> None:
    with torch.no_grad():
        tiny_llama.model.layers[0].mlp.up_proj.weight.mul_(1000)
    before, after = tiny_llama.state_dict(), perturb(tiny_llama, noise, 3).state_dict()
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        added = (after[name] - before[name]).square().mean().sqrt() / before[name].square().mean().sqrt()
        # 512 draws of N(0, 1): their RMS is within 4 / sqrt(2 * 512) = 12.5 % of 1.
        assert added.item() == pytest.approx(noise, rel=0.125)


def test_vectors_and_the_original_stay(tiny_llama: LlamaForCausalLM) -> None:
    before = {name: weights.clone() for name, weights in tiny_llama.state_dict().items()}
    after = perturb(tiny_llama, 0.1, 1).state_dict()
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert all(torch.equal(weights, before[name]) for name, weights in tiny_llama.state_dict().items())
