from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from dsde.models.deepen import deepen

TOKENS = torch.tensor([[3, 4, 5, 3, 1, 2], [5, 5, 0, 3, 4, 1]])


def test_added_layers_leave_every_logit_as_it_was(tiny_llama: LlamaForCausalLM) -> None:
    deep = deepen(tiny_llama, 5)
    with torch.no_grad():
        assert torch.equal(deep(TOKENS).logits, tiny_llama(TOKENS).logits)


def test_each_added_layer_has_its_own_place_in_the_kv_cache(tiny_llama: LlamaForCausalLM) -> None:
    def decode(model: LlamaForCausalLM) -> torch.Tensor:
        cache, tokens, logits = None, TOKENS, []
        for _ in range(4):
            output = model(tokens, past_key_values=cache, use_cache=True)
            cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
            logits.append(output.logits[:, -1])
        return torch.stack(logits)

    with torch.no_grad():
        assert torch.equal(decode(deepen(tiny_llama, 3)), decode(tiny_llama))


def test_the_configuration_counts_the_layers_and_the_original_is_untouched(tiny_llama: LlamaForCausalLM) -> None:
    deep = deepen(tiny_llama, 5)
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 7
    assert [layer.self_attn.layer_idx for layer in deep.model.layers] == list(range(7))
    assert tiny_llama.config.num_hidden_layers == len(tiny_llama.model.layers) == 2


def test_an_added_layer_computes_on_real_weights(tiny_llama: LlamaForCausalLM) -> None:
    added = deepen(tiny_llama, 1).model.layers[2]
    assert torch.equal(added.mlp.up_proj.weight, tiny_llama.model.layers[0].mlp.up_proj.weight)
    assert added.mlp.up_proj.weight.any()
    assert not added.mlp.down_proj.weight.any()
    assert not added.self_attn.o_proj.weight.any()
