"""Traces on disk and in replay: the way through a trace by hand, plain decoding, the oracles' lead."""

from pathlib import Path

import pytest

from dsde.control.replay import COSTS, StepCosts, replay, replay_oracle
from dsde.control.trace import RequestTrace, Round, Trace, synthesize

FLAT = StepCosts(10.0, 1.0, 2.0)


def made(*accepted: int, length: int = 4) -> Trace:
    """One greedy request whose rounds accept that many of `length`."""
    some = (0.5,) * length
    rounds = tuple(Round(some, some, some, some, a) for a in accepted)
    return Trace(length, (RequestTrace("r", "w", 0.0, rounds),))


def test_a_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    trace = synthesize(requests=3, rounds=4, acceptance=0.6, seed=2)
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        trace.write(tmp_path / name)
        back = Trace.read(tmp_path / name)
        assert (back.length, back.notes) == (10, {"acceptance": 0.6, "seed": 2})
        for old, new in zip(trace.requests, back.requests, strict=True):
            assert (new.request_id, new.workload, new.temperature) == (old.request_id, "made-up", 0.0)
            assert [r.accepted for r in new.rounds] == [r.accepted for r in old.rounds]
            assert new.rounds[0].top_prob == pytest.approx(old.rounds[0].top_prob, abs=1e-4)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"format": "other"}\n')
    with pytest.raises(ValueError, match="no header of a dsde-trace, version 1"):
        Trace.read(path)
    with pytest.raises(ValueError, match="give four lists of one length"):
        Round.from_json({"p": [0.5], "h": [], "kld": [0.1], "overlap": [0.2], "a": 0})


def test_a_static_length_by_hand() -> None:
    # Rounds accept 3, 1, 4 of 4; K = 2. Step 1 decodes the first token without drafts: past slot 1 of round one. Step
    # 2 verifies slots 2 3, both accepted, and the correction after them ends the round. Step 3 verifies two of round
    # two, one accepted. Step 4 two of round three, both accepted, and the third comes with the bonus token.
    outcome = replay("static", made(3, 1, 4), FLAT, 1, settings={"length": 2}, steps=4)
    assert outcome.tokens == 1 + 3 + 2 + 3
    # Verification 10 + t of 1, 3, 3, 3 tokens, and two draft steps of 2 ms after each.
    assert outcome.time_ms == pytest.approx(11 + 13 * 3 + 4 * 4)
    assert outcome.acceptance_rate == pytest.approx(5 / 6)
    assert outcome.mean_acceptance_length == pytest.approx(9 / 4)
    assert outcome.draft_steps == 8


def test_plain_decoding_is_the_measure() -> None:
    for load in (1, 5, [(2, 40), (6, 180)]):
        outcome = replay("autoregressive", made(3, 1, 4, 0, 2), FLAT, load, steps=50)
        assert outcome.ratio == pytest.approx(1.0)
        assert outcome.off_share == 1.0


def test_a_stop_rule_costs_its_sync_and_saves_its_steps() -> None:
    # Entropy .5 <= .72 never stops AdaEDL, above it always: one draft step a time.
    sync = StepCosts(10.0, 1.0, 2.0, sync=0.5)
    calm = replay("adaedl", made(4, 4, 4, 4), sync, 1, settings={"length": 4}, steps=2)
    assert calm.draft_steps == 8
    hasty = replay("adaedl", made(4, 4, 4, 4), sync, 1, settings={"length": 4, "threshold": 0.9}, steps=2)
    assert hasty.draft_steps == 2
    assert hasty.time_ms == pytest.approx(11 + 12 + 2 * 2.5)


@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), (0.0, 8), (1.0, 1), (1.0, 8)])
def test_no_policy_beats_who_knows_every_acceptance(temperature: float, batch: int) -> None:
    trace = synthesize(requests=24, rounds=40, acceptance=0.7, temperature=temperature, seed=4)
    clairvoyant = replay_oracle("acceptances", trace, COSTS["cpu"], batch, steps=100).tokens_per_s
    chances = replay_oracle("chances", trace, COSTS["cpu"], batch, steps=100).tokens_per_s
    assert chances <= clairvoyant * 1.001
    for policy, settings in (("goodput", {}), ("static", {"length": 2}), ("adaedl", {})):
        assert replay(policy, trace, COSTS["cpu"], batch, settings=settings, steps=100).tokens_per_s < clairvoyant


def test_goodput_holds_against_the_best_fixed_length_when_the_load_moves() -> None:
    trace = synthesize(requests=32, rounds=60, acceptance=0.8, seed=5)
    load = [(1, 120), (8, 500), (32, 1000), (4, 400), (1, 120)]
    fixed = max(replay("static", trace, COSTS["cpu"], load, settings={"length": k}).tokens_per_s for k in (1, 2, 3))
    assert replay("goodput", trace, COSTS["cpu"], load).tokens_per_s >= 1.05 * fixed


def test_an_oracle_knows_one_of_two_things() -> None:
    with pytest.raises(ValueError, match="choose acceptances or chances"):
        replay_oracle("future", made(1), FLAT, 1)
