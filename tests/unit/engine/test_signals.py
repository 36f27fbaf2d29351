"""What is measured on distributions, against numbers worked by hand."""

import math

import pytest
import torch

from dsde.engine import signals
from dsde.engine.signals import divergence, entropy, kl_divergence, overlap

NEVER = -math.inf
P = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
Q = torch.tensor([[0.25, 0.5, 0.25], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
# Row 0: .5 ln(.5/.25) + .5 ln(.5/.5) + 0 = .5 ln 2. Row 1: .5 ln .5 + .5 (ln .5 - ln 1e-8) = 4 ln 10 - ln 2.
# Row 2: p = q.
KLD = [0.5 * math.log(2.0), 4.0 * math.log(10.0) - math.log(2.0), 0.0]
# Row 0: .25 + .5 + 0. Row 1: .5 + 0 + 0. Row 2: all of it.
OVERLAP = [0.75, 0.5, 1.0]


def test_kl_divergence_and_overlap_of_probabilities() -> None:
    assert kl_divergence(P, Q).tolist() == pytest.approx(KLD, abs=1e-6)
    assert overlap(P, Q).tolist() == pytest.approx(OVERLAP, abs=1e-6)


def test_divergence_of_logits_does_not_see_their_offset() -> None:
    kld, shared = divergence(P.log() + 7.0, Q.log() - 300.0)
    assert kld.tolist() == pytest.approx(KLD, abs=3e-5)
    assert shared.tolist() == pytest.approx(OVERLAP, abs=3e-5)


def test_divergence_takes_draft_probabilities() -> None:
    kld, shared = divergence(P.log(), Q, q_is_probs=True)
    assert kld.tolist() == pytest.approx(KLD, abs=1e-6)
    assert shared.tolist() == pytest.approx(OVERLAP, abs=1e-6)


def test_divergence_of_identical_logits_is_zero() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 6.0
    logits[1, ::2] = NEVER
    kld, shared = divergence(logits, logits.clone())
    assert kld.tolist() == [0.0, 0.0, 0.0]
    assert shared.tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)


def test_a_masked_target_is_measured_exactly() -> None:
    # Greedy-like target, everything but one token masked: KLD = -ln q(token) = ln 4, overlap = q(token) = 1/4.
    p_logits = torch.full((1, 4), NEVER)
    p_logits[0, 2] = 11.0
    kld, shared = divergence(p_logits, torch.zeros(1, 4))
    assert kld.item() == pytest.approx(math.log(4.0), abs=1e-6)
    assert shared.item() == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("side", ["target", "draft", "probs", "nothing finite", "infinite"])
def test_a_row_that_cannot_be_measured_is_nan_and_alone(side: str) -> None:
    x, y = torch.zeros(3, 4), torch.zeros(3, 4)
    bad = y if side in ("draft", "probs") else x
    bad[1, 2] = math.inf if side == "infinite" else math.nan
    if side == "nothing finite":
        x[1] = NEVER
    q = torch.where(y.isnan(), y, 0.25) if side == "probs" else y
    kld, shared = divergence(x, q, q_is_probs=side == "probs")
    assert kld.isnan().tolist() == [False, True, False]
    assert shared.isnan().tolist() == [False, True, False]


def test_the_floors_never_make_a_divergence_negative() -> None:
    # 50,000 tails of p = 2e-8, q = 1e-9: floored, they add 2e-8 ln 2 each where the head loses 1.9e-8.
    x, y = torch.full((1, 50_001), math.log(2e-8)), torch.full((1, 50_001), math.log(1e-9))
    x[0, 0] = y[0, 0] = 0.0
    assert divergence(x, y)[0].item() == 0.0


def test_chunks_give_what_one_sweep_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(2)
    x, y = torch.randn(7, 100, generator=random), torch.randn(7, 100, generator=random)
    whole = divergence(x, y)
    monkeypatch.setattr(signals, "CHUNK_ELEMENTS", 300)
    for one, other in zip(whole, divergence(x, y), strict=True):
        assert torch.equal(one, other)
    p, q = x.double().softmax(-1), y.double().softmax(-1)
    assert whole[0].tolist() == pytest.approx((p * (p / q).log()).sum(-1).tolist(), abs=1e-5)


def test_divergence_leaves_its_inputs_alone_and_reads_bfloat16() -> None:
    x = torch.tensor([[0.0, 1.0, NEVER]], dtype=torch.bfloat16)
    before = x.clone()
    kld, shared = divergence(x, x)
    assert torch.equal(x, before)
    assert (kld.dtype, shared.dtype, kld.item()) == (torch.float32, torch.float32, 0.0)


def test_divergence_of_no_rows_and_of_unequal_shapes() -> None:
    kld, shared = divergence(torch.empty(0, 9), torch.empty(0, 9))
    assert (kld.shape, shared.shape) == ((0,), (0,))
    with pytest.raises(ValueError, match=r"\(2, 9\).*\(2, 8\)"):
        divergence(torch.empty(2, 9), torch.empty(2, 8))


def test_entropy() -> None:
    # Row 0: -2 (.5 ln .5) = ln 2. Row 2: -(.2 ln .2 + .3 ln .3 + .5 ln .5) = .321888 + .361192 + .346574.
    assert entropy(P).tolist() == pytest.approx([math.log(2.0), math.log(2.0), 1.029653], abs=1e-6)
