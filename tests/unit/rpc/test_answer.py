from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.rpc.answer import Answer


def output(text: str, ids: list[int], reason: str | None = None, **more: Any) -> SimpleNamespace:
    completion = {"logprobs": None, "stop_reason": None, "spec_decode_metrics": None, **more}
    one = SimpleNamespace(text=text, token_ids=ids, finish_reason=reason, **completion)
    return SimpleNamespace(outputs=[one], num_cached_tokens=4)


def logprob(value: float, rank: int | None, text: str | None) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=rank, decoded_token=text)


def test_usage_counts_all_deltas_and_stands_on_the_last() -> None:
    answer = Answer("id", "model", 7, None)
    assert answer.message(output("", [])) is None
    first = answer.message(output("One", [11, 12]))
    last = answer.message(output(" two", [13], "length"))
    assert first is not None
    assert last is not None
    assert not first.HasField("usage")
    assert first.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert last.usage == pb.Usage(prompt_tokens=7, completion_tokens=3, cached_prompt_tokens=4)
    assert (last.finish_reason, last.WhichOneof("stop_reason")) == (pb.FINISH_REASON_LENGTH, None)
    assert not last.HasField("speculation")


def test_the_reason_for_a_stop_is_a_text_or_a_token() -> None:
    text = Answer("id", "model", 1, None).message(output("a", [1], "stop", stop_reason="END"))
    token = Answer("id", "model", 1, None).message(output("a", [1], "stop", stop_reason=0))
    assert text is not None
    assert token is not None
    assert (text.WhichOneof("stop_reason"), text.stop) == ("stop", "END")
    assert (token.WhichOneof("stop_reason"), token.stop_token_id) == ("stop_token_id", 0)


def test_logprobs_give_the_chosen_token_and_the_likeliest_best_first() -> None:
    place = {
        9: logprob(-math.inf, 40, None),
        3: logprob(-1.5, 2, " b"),
        5: logprob(-0.5, 1, " a"),
        8: logprob(-2.0, 3, " c"),
        7: logprob(-9.0, None, " d"),
    }
    message = Answer("id", "model", 1, 2).message(output("x", [9], logprobs=[place]))
    assert message is not None
    (reported,) = message.logprobs
    assert reported.chosen == pb.TokenLogprob(token_id=9, text="", logprob=-math.inf, rank=40)
    assert [(one.token_id, one.text, one.logprob) for one in reported.top] == [(5, " a", -0.5), (3, " b", -1.5)]


def test_an_unknown_figure_does_not_cost_the_answer() -> None:
    figures = {"mean_acceptance_length": 1.5, "acceptance_histogram": [1, 1], "new": 1, "dsde": {"policy": "paper"}}
    metrics = SimpleNamespace(to_dict=lambda: figures)
    message = Answer("id", "model", 1, None).message(output("x", [9], "stop", spec_decode_metrics=metrics))
    assert message is not None
    assert message.speculation.mean_acceptance_length == 1.5
    assert list(message.speculation.acceptance_histogram) == [1, 1]
    assert not message.speculation.dsde.HasField("stability")
