"""Asynchronous scheduling, step by step: real Scheduler objects with hand-made worker outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.conftest import EOS

LENGTH = 4


@pytest.fixture
def make_scheduler(tiny_pair: tuple[str, str]) -> Any:
    def make(policy: str = "static", settings: dict[str, Any] | None = None) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from dsde.config import DsdeConfig
        from dsde.engine.plugin import engine_arguments
        from dsde.engine.scheduler import DsdeAsyncScheduler

        target, draft = tiny_pair
        config = DsdeConfig.model_validate(
            {
                "model": {"target": target, "draft": draft, "dtype": "float32", "max_model_len": 128},
                "speculation": {"policy": policy, "settings": settings or {}, "max_length": LENGTH},
                "engine": {"max_num_seqs": 8},
            }
        )
        vllm_config = EngineArgs(**engine_arguments(config), skip_tokenizer_init=True).create_engine_config()
        vllm_config.scheduler_config.async_scheduling = True
        vllm_config.cache_config.num_gpu_blocks = 64
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        return DsdeAsyncScheduler(vllm_config, cache, StructuredOutputManager(vllm_config), block_size=16)

    return make


def request(request_id: str, max_tokens: int = 40, **options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=options)
    parameters.update_from_generation_config({}, EOS)
    return Request(request_id, prompt_token_ids=[0, 3, 4], sampling_params=parameters, pooling_params=None)


def run_worker(scheduled: Any, accepted: dict[str, int], kld: float = 0.1) -> Any:
    """What a GPU worker would answer: each request accepts `accepted` of its drafts, every position measures `kld`."""
    from vllm.v1.outputs import ModelRunnerOutput

    from dsde.engine.transport import WorkerReport, attach_report

    ids = list(scheduled.num_scheduled_tokens)
    drafts = {i: len(scheduled.scheduled_spec_decode_tokens.get(i, ())) for i in ids}
    output = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[5] * (1 + min(accepted.get(i, 0), drafts[i])) for i in ids],
    )
    verified = [i for i in ids if drafts[i]]
    total = sum(drafts.values())
    report = WorkerReport(
        request_ids=tuple(verified),
        num_draft_tokens=tuple(drafts[i] for i in verified),
        kld=torch.full((total,), kld),
        overlap=torch.full((total,), 0.5),
        draft_step_ms=1.0,
    )
    attach_report(output, report)
    return output


def drafts_of(scheduled: Any) -> dict[str, int]:
    return {i: len(tokens) for i, tokens in scheduled.scheduled_spec_decode_tokens.items()}


def test_each_request_gets_its_own_length_one_step_ahead(make_scheduler: Any) -> None:
    scheduler = make_scheduler("static", {"length": 3})
    scheduler.add_request(request("a"))
    scheduler.add_request(request("b", dsde_max_length=1))
    scheduler.add_request(request("c", dsde_policy="autoregressive"))
    first = scheduler.schedule()
    assert drafts_of(first) == {}
    assert first.num_spec_tokens_to_schedule == 3
    # The next step is scheduled before the first one's output is known: that is what asynchronous means.
    second = scheduler.schedule()
    assert drafts_of(second) == {"a": 3, "b": 1}
    assert second.num_scheduled_tokens == {"a": 4, "b": 2, "c": 1}
    assert all(token == -1 for tokens in second.scheduled_spec_decode_tokens.values() for token in tokens)


def test_rejected_drafts_are_given_back_and_counted(make_scheduler: Any) -> None:
    scheduler = make_scheduler("static", {"length": 3})
    scheduler.add_request(request("a"))
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.update_from_output(first, run_worker(first, {}))
    third = scheduler.schedule()
    scheduler.update_from_output(second, run_worker(second, {"a": 1}))
    scheduler.update_from_output(third, run_worker(third, {"a": 3}))
    figures = scheduler.controller.snapshot("a")
    # Prefill gives one token, then 1 + 1 and 3 + 1: seven tokens in two verification steps of three drafts each.
    assert scheduler.requests["a"].num_output_tokens == 7
    assert (figures.steps, figures.length_mean, figures.kld_mean) == (2, 3.0, pytest.approx(0.1))
    assert scheduler.requests["a"].spec_decode_metrics.histogram == [0, 1, 0, 1, 0]


def test_each_output_brings_all_where_a_stop_string_may_end_the_request(make_scheduler: Any) -> None:
    scheduler = make_scheduler("static", {"length": 3})
    stopping = request("a")
    stopping.sampling_params.stop = ["end"]
    scheduler.add_request(stopping)
    scheduler.add_request(request("b"))
    scheduler._events.admit("a")
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, run_worker(first, {}))
    outputs = scheduler.update_from_output(second, run_worker(second, {"a": 1}))[0].outputs
    carried = {output.request_id: output.kv_transfer_params for output in outputs}
    assert carried["b"] is None
    assert set(carried["a"]) == {"dsde", "dsde_engine", "dsde_events"}
    assert carried["a"]["dsde"]["steps"] == 1
    assert carried["a"]["dsde_engine"]["policy"] == "static"
    assert carried["a"]["dsde_events"][0][0] == "dsde.speculation.on"


def test_off_schedules_plain_decodes(make_scheduler: Any) -> None:
    scheduler = make_scheduler("autoregressive")
    scheduler.add_request(request("a"))
    first = scheduler.schedule()
    assert first.num_spec_tokens_to_schedule == 0
    second = scheduler.schedule()
    assert (second.num_scheduled_tokens, drafts_of(second)) == ({"a": 1}, {})


def test_policy_change_rides_home_with_an_output(make_scheduler: Any) -> None:
    from dsde.engine.transport import PolicyChange, WorkerReport, attach_report

    scheduler = make_scheduler("static", {"length": 3})
    scheduler.add_request(request("a"))
    first = scheduler.schedule()
    output = run_worker(first, {})
    attach_report(output, WorkerReport(policy_change=PolicyChange("static", {"length": 1})))
    scheduler.update_from_output(first, output)
    second = scheduler.schedule()
    assert drafts_of(second) == {"a": 3}
    assert second.num_spec_tokens_to_schedule == 1
    assert drafts_of(scheduler.schedule()) == {"a": 1}


def test_no_draft_past_the_answer_s_end(make_scheduler: Any) -> None:
    scheduler = make_scheduler("static", {"length": 4})
    scheduler.add_request(request("a", max_tokens=4))
    scheduler.schedule()
    # One token comes from the prefill; of the three left one is the bonus token.
    assert drafts_of(scheduler.schedule()) == {"a": 2}


def test_abort_and_finish_free_the_controller(make_scheduler: Any) -> None:
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler("paper")
    for name in "abc":
        scheduler.add_request(request(name, max_tokens=6))
    scheduler.finish_requests(["c"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.controller.live == 2
    for _ in range(12):
        scheduled = scheduler.schedule()
        if scheduled.num_scheduled_tokens:
            scheduler.update_from_output(scheduled, run_worker(scheduled, {"a": 1, "b": 0}))
    assert (scheduler.get_request_counts(), scheduler.controller.live) == ((0, 0), 0)


def test_bad_option_under_plain_vllm_serve_falls_back_to_the_default(make_scheduler: Any) -> None:
    scheduler = make_scheduler("static", {"length": 2})
    scheduler.add_request(request("a", dsde_policy="fastest"))
    scheduler.schedule()
    assert drafts_of(scheduler.schedule()) == {"a": 2}


def test_the_drafter_rests_and_goes_on_one_step_ahead(make_scheduler: Any) -> None:
    scheduler = make_scheduler("static", {"length": 3})
    scheduler.add_request(request("a"))
    pending = [scheduler.schedule(), scheduler.schedule()]
    depths, drafts = [], []
    for length in (0, 0, 3, 3):
        done = pending.pop(0)
        scheduler.update_from_output(done, run_worker(done, {"a": 1}))
        scheduler.controller.set_policy("static", {"length": length})
        pending.append(scheduler.schedule())
        depths.append(pending[-1].num_spec_tokens_to_schedule)
        drafts.append(drafts_of(pending[-1]))
    # A step's plan says how many placeholders the next one has; the last drafts before the rest are still verified.
    assert (depths, drafts) == ([0, 0, 3, 3], [{"a": 3}, {}, {}, {"a": 3}])


def test_a_late_report_leaves_no_ended_request_behind(make_scheduler: Any) -> None:
    from vllm.v1.request import RequestStatus

    from dsde.engine.transport import WorkerReport, attach_report

    scheduler = make_scheduler("static", {"length": 3})
    for name in "ab":
        scheduler.add_request(request(name))
    first = scheduler.schedule()
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    output = run_worker(first, {})
    attach_report(output, WorkerReport(left_behind=("a", "b")))
    scheduler.update_from_output(first, output)
    assert scheduler._left_behind == {"a"}
    assert scheduler.schedule().num_spec_tokens_to_schedule == 0
