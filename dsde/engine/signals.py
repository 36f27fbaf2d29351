"""What is measured on distributions, on their device: pure functions over batched tensors; nothing here keeps state.

p is the target's distribution and q the draft's, everywhere. Divergences and entropies are in nats.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["FLOOR", "confidence", "divergence", "entropy", "kl_divergence", "overlap"]

FLOOR = 1e-8
"""Smallest probability inside a logarithm, so that q = 0 under p > 0 costs a large but finite divergence."""
LN_FLOOR = math.log(FLOOR)

CHUNK_ELEMENTS = 1 << 18
"""Elements of one float32 buffer on a CPU: 1 MiB, so that the four of them stay in cache between passes."""
CHUNK_ELEMENTS_GPU = 1 << 24
"""The same on a GPU: 64 MiB, few launches in bounded memory."""


def divergence(p_logits: Tensor, q: Tensor, *, q_is_probs: bool = False) -> tuple[Tensor, Tensor]:
    """KL divergence and overlap of N pairs of distributions in one sweep: (kld [N], overlap [N]), both float32.

    kld = sum_v p (ln p - ln q) in nats, overlap = sum_v min(p, q), over the full vocabulary.
    p_logits: [N, V], already scaled by the temperature and masked; -inf means p = 0, which contributes 0.
    q: [N, V], logits of the same kind, or probabilities with q_is_probs. Both logarithms are floored at ln FLOOR.
    A row with a NaN, or with no finite logit at all, gives NaN in both. Inputs may be of any float type and stay as
    they are. ValueError when the shapes differ or are not [N, V].
    """
    if p_logits.shape != q.shape or p_logits.dim() != 2:
        raise ValueError(
            f"p_logits {tuple(p_logits.shape)} and q {tuple(q.shape)}: give two tensors of one shape [N, V]"
        )
    n, vocabulary = p_logits.shape
    elements = CHUNK_ELEMENTS if p_logits.device.type == "cpu" else CHUNK_ELEMENTS_GPU
    rows = max(1, min(n, elements // max(1, vocabulary)))
    buffers = torch.empty(4, rows, vocabulary, dtype=torch.float32, device=p_logits.device)
    kld = torch.empty(n, dtype=torch.float32, device=p_logits.device)
    shared = torch.empty_like(kld)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        x, y = p_logits[part].float(), q[part].float()
        p, q_, ln_p, ln_q = buffers[:, : x.shape[0]]
        _softmax(x, p, ln_p)
        if q_is_probs:
            q_ = y
            torch.clamp(y, min=FLOOR, out=ln_q).log_()
        else:
            _softmax(y, q_, ln_q)
        torch.sum(ln_p.sub_(ln_q).mul_(p), dim=-1, out=kld[part])
        torch.sum(torch.minimum(p, q_, out=ln_q), dim=-1, out=shared[part])
    # The floors can leave a hair of negative mass; a divergence has none.
    return kld.clamp_(min=0.0), shared


def _softmax(logits: Tensor, probs: Tensor, logs: Tensor) -> None:
    """Fill probs with softmax(logits) and logs with its floored logarithm, both [n, V]."""
    torch.softmax(logits, dim=-1, out=probs)
    # The largest entry gives the normaliser, which saves a logarithm per element.
    normaliser = logits.amax(dim=-1, keepdim=True) - probs.amax(dim=-1, keepdim=True).log_()
    torch.sub(logits, normaliser, out=logs).clamp_(min=LN_FLOOR)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """D_KL(p || q) = sum_v p (ln p - ln q) in nats, [N], of probabilities p, q [N, V]; logarithms floored."""
    return (p * (p.clamp(min=FLOOR).log() - q.clamp(min=FLOOR).log())).sum(dim=-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum_v min(p, q) = 1 - TV(p, q), [N]: the chance that rejection sampling accepts a token drawn from q [N, V]."""
    return torch.minimum(p, q).sum(dim=-1)


def entropy(p: Tensor) -> Tensor:
    """H(p) = -sum_v p ln p in nats, [N], of probabilities p [N, V]; p = 0 contributes 0."""
    terms: Tensor = torch.special.entr(p)
    return terms.sum(dim=-1)


def confidence(q: Tensor, *, is_probs: bool = False) -> tuple[Tensor, Tensor]:
    """How sure a draft step is: (max_v q [B], H(q) [B] in nats), both float32.

    q: [B, V], logits, or probabilities with is_probs. NaN rows give NaN.
    """
    if is_probs:
        return q.amax(dim=-1), entropy(q)
    x = q.float()
    normaliser = x.logsumexp(dim=-1, keepdim=True)
    top_prob = torch.exp(x.amax(dim=-1) - normaliser.squeeze(-1))
    ln_q = x - normaliser
    # A masked token has ln q = -inf and q = 0: its share of the entropy is 0.
    return top_prob, -(ln_q.exp() * ln_q.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)
