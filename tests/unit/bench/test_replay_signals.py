from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dsde.bench.replay_signals import Foresight, calibration, foresee
from dsde.bench.trail import auc
from dsde.cli import main
from dsde.control.trace import RequestTrace, Round, Trace, synthesize


def foreseen(confidence: float, temperature: float = 0.0) -> Foresight:
    trace = synthesize(
        requests=16, rounds=12, acceptance=0.7, temperature=temperature, length=4, confidence=confidence, seed=7
    )
    return foresee("made-up", trace, temperature, 4)


def known(figure: float | None) -> float:
    assert figure is not None
    return figure


def test_calibration_by_hand() -> None:
    # Ten slots at .2 of which none is accepted, ten at .9 of which all are: bins of two, off by .2 and by .1.
    predicted, accepted = np.array([0.2] * 10 + [0.9] * 10), np.array([0.0] * 10 + [1.0] * 10)
    error, bins = calibration(predicted, accepted)
    assert error == pytest.approx(0.15)
    assert [one.slots for one in bins] == [2] * 10
    assert (bins[0].predicted, bins[0].expected, bins[-1].expected) == (0.2, 0.0, 1.0)
    # Within a bin errors of both signs cancel: the mean of .5 and .5 against one of two.
    assert calibration(np.full(20, 0.5), np.tile([0.0, 1.0], 10))[0] == pytest.approx(0.0)
    assert calibration(np.array([]), np.array([])) == (None, ())


def test_auc_by_hand() -> None:
    # Pairs (accepted, rejected): .9 > .5, .9 > .1, .4 < .5, .4 > .1; and a tie counts half.
    assert auc(np.array([0.9, 0.5, 0.4, 0.1]), np.array([1.0, 0.0, 1.0, 0.0])) == pytest.approx(0.75)
    assert auc(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == pytest.approx(0.5)
    assert auc(np.array([0.5, 0.6]), np.array([1.0, 1.0])) is None


def test_a_drafter_that_knows_is_believed_and_one_that_does_not_is_not() -> None:
    sharp, dull = foreseen(confidence=4.0), foreseen(confidence=0.2)
    assert known(sharp.auc["mix"]["confidence"]) > 0.8 > 0.7 > known(dull.auc["mix"]["confidence"])
    assert known(sharp.auc["mix"]["entropy"]) > 0.8
    assert known(sharp.controller_auc) > known(dull.controller_auc) + 0.1
    assert known(sharp.correlations["mix"]["confidence"]) > 0.4
    assert known(sharp.correlations["mix"]["entropy"]) < -0.4
    assert sharp.correlations.keys() == {"mix", "made-up"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_held_out_half_is_seen_once_and_predicted_well(temperature: float) -> None:
    found = foreseen(confidence=2.0, temperature=temperature)
    assert sum(one.slots for one in found.bins) == found.slots > 100
    assert known(found.calibration_error) < 0.12
    assert found.predicted == pytest.approx(found.expected, abs=0.08)


def test_slots_are_those_up_to_the_first_rejection() -> None:
    def request(name: str) -> RequestTrace:
        def drafted(accepted: int) -> Round:
            return Round((0.9, 0.8, 0.3), (0.1, 0.2, 1.0), (0.1, 0.1, 2.0), (0.9, 0.8, 0.1), accepted)

        return RequestTrace(name, "code", 0.0, (drafted(0), drafted(2), drafted(1)))

    found = foresee("by hand", Trace(3, (request("a"), request("b"))), 0.0, 3)
    # A request's first step has no drafts and takes the first round; then 2 and 1 of 3 are accepted: 3 + 2 slots.
    assert found.slots == 5
    assert found.expected == pytest.approx(3 / 5)
    # Accepted at .9, .8 and .9, rejected at .3 and .8: of six pairs one is a tie.
    assert found.auc["mix"]["confidence"] == pytest.approx(5.5 / 6)
    # Both halves, two steps with drafts each.
    assert found.steps["mix"] == 4


def test_a_signal_that_tells_more_earns_its_place_in_the_ablation() -> None:
    draw = np.random.default_rng(3)

    def drafted() -> Round:
        # Confidence says nothing; the KLD of a step says what becomes of the next one.
        calm = bool(draw.random() < 0.5)
        state.append(calm)
        accepted = 0 if len(state) < 2 else 3 if state[-2] else 0
        klds = (0.05, 0.05, 0.05) if calm else (4.0, 4.0, 4.0)
        return Round((0.5, 0.5, 0.5), (1.0, 1.0, 1.0), klds, (0.5, 0.5, 0.5), accepted)

    requests = []
    for number in range(12):
        state: list[bool] = []
        requests.append(RequestTrace(f"r{number}", "code", 0.0, tuple(drafted() for _ in range(30))))
    found = foresee("by hand", Trace(3, tuple(requests)), 0.0, 3)
    assert known(found.ablation["kld"]) > known(found.ablation["none"]) + 0.05
    assert known(found.ablation["both"]) > known(found.ablation["wvir"]) + 0.05
    assert 0 < found.ablated < found.slots


def test_no_held_out_request_is_seen_twice() -> None:
    # A first token without drafts, then one slot that is rejected.
    rejected = Round((0.5,), (1.0,), (1.0,), (0.5,), 0)
    requests = tuple(RequestTrace(f"r{number}", "code", 0.0, (rejected, rejected)) for number in range(16))
    found = foresee("by hand", Trace(1, requests), 0.0, 1)
    assert (found.slots, found.expected, found.controller_auc) == (8, 0.0, None)


def test_signals_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, result = tmp_path / "t.jsonl", tmp_path / "s.json"
    synthesize(requests=4, rounds=8, acceptance=0.7, length=3).write(trace)
    arguments = ["--signals", "--json", str(result), "--plot", str(tmp_path / "p")]
    assert main(["replay", str(trace), *arguments]) == 0
    text = capsys.readouterr().out
    assert "signals against the next step's acceptance (Spearman)" in text
    assert "Drafts of 3 tokens at every step." in text
    written = json.loads(result.read_text())
    assert written["cells"] == []
    [own] = written["signals"]
    assert set(own["auc"]["mix"]) == {"confidence", "entropy", "kld", "wvir", "average"}
    assert set(own["ablation"]) == {"none", "kld", "wvir", "both"}
    assert (tmp_path / "p" / "calibration.png").exists()
