"""How observations go up and figures go out.

Up: the worker hangs a WorkerReport on vLLM's ModelRunnerOutput as a plain attribute, and the scheduler joins it with
what it knows itself into a StepObservation. Out: figures, events, and the costs that the engine has learnt, leave as
entries of RequestOutput.kv_transfer_params, and an EngineStep as SchedulerStats.kv_connector_stats, which is free
without a KV connector. In: a continued request brings the tokens that another engine gave as an entry of
SamplingParams.extra_args; its first SchedulerOutput hands them to the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from dsde.control.arrays import Numbers
from dsde.control.controller import Controller
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.telemetry.step import EngineStep

__all__ = [
    "EMITTED_KEY",
    "ENGINE_KEY",
    "EVENTS_KEY",
    "FIGURES_KEY",
    "PolicyChange",
    "WorkerReport",
    "attach_emitted",
    "attach_plan",
    "attach_report",
    "attach_step",
    "emitted_by",
    "emitted_of",
    "engine_costs",
    "observation",
    "plan_of",
    "report_of",
    "take_step",
]

FIGURES_KEY = "dsde"
EVENTS_KEY = "dsde_events"
ENGINE_KEY = "dsde_engine"
EMITTED_KEY = "dsde_emitted"
_STEP = "dsde_step"
_REPORT = "dsde_report"
_PLAN = "dsde_plan"
_EMITTED = "dsde_emitted"


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """A new default policy on its way to the controller."""

    policy: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the worker measured in one engine step.

    request_ids, num_draft_tokens: the requests whose drafts were verified, in batch order, and how many of each.
    kld, overlap: [N] float32 on the host, see StepObservation.
    draft_step_ms: mean time of a draft step, None when nothing was drafted.
    catch_up_ms, draft_ids, draft_top_prob, draft_entropy, step_ms: see StepObservation.
    policy_change: set once per set_speculation_policy() call.
    left_behind: requests whose backlog no single pass of the draft can read: they cannot speculate any more.
    """

    request_ids: tuple[str, ...] = ()
    num_draft_tokens: tuple[int, ...] = ()
    kld: torch.Tensor | None = None
    overlap: torch.Tensor | None = None
    draft_step_ms: float | None = None
    catch_up_ms: float | None = None
    draft_ids: tuple[str, ...] = ()
    draft_top_prob: torch.Tensor | None = None
    draft_entropy: torch.Tensor | None = None
    step_ms: float | None = None
    policy_change: PolicyChange | None = None
    left_behind: tuple[str, ...] = ()


def attach_report(output: ModelRunnerOutput, report: WorkerReport) -> None:
    """Hang the report on vLLM's output; the pickle between worker and scheduler carries it as it is."""
    setattr(output, _REPORT, report)


def report_of(output: ModelRunnerOutput) -> WorkerReport:
    """The report of this output, empty where the worker had nothing to say."""
    report = getattr(output, _REPORT, None)
    return report if report is not None else WorkerReport()


def attach_plan(output: SchedulerOutput, plan: SpeculationPlan) -> None:
    """Remember which plan the drafting of this engine step followed."""
    setattr(output, _PLAN, plan)


def plan_of(output: SchedulerOutput) -> SpeculationPlan | None:
    """The plan attached to this engine step, None for one that planned nothing."""
    return getattr(output, _PLAN, None)


def emitted_by(params: SamplingParams | None) -> list[int]:
    """The tokens with which a continued request begins its answer; empty for any other request."""
    return list(((params.extra_args if params is not None else None) or {}).get(EMITTED_KEY, ()))


def attach_emitted(output: SchedulerOutput, emitted: Mapping[str, Sequence[int]]) -> None:
    """Give the worker the tokens of continued requests that are new in this engine step, by request id."""
    setattr(output, _EMITTED, emitted)


def emitted_of(output: SchedulerOutput) -> Mapping[str, Sequence[int]]:
    """The tokens attached to this engine step."""
    found: Mapping[str, Sequence[int]] = getattr(output, _EMITTED, {})
    return found


def engine_costs(controller: Controller, running: int) -> dict[str, Any]:
    """What the scheduler sends along with a finished request, as plain values.

    verify: [a, b], draft: d for `running` requests, prompt: one prompt token, all in ms, or None where none has been
    measured. policy: the default policy's name.
    """
    cost = controller.cost
    measured = cost.measured
    return {
        "verify": list(cost.line) if measured else None,
        "draft": cost.draft(max(1, running)) if measured else None,
        "prompt": cost.prompt,
        "policy": controller.policy.name,
    }


def attach_step(stats: SchedulerStats, step: EngineStep) -> None:
    """Send `step` along with vLLM's statistics; a KV connector's own are left alone."""
    if stats.kv_connector_stats is None:
        stats.kv_connector_stats = {_STEP: step}


def take_step(stats: SchedulerStats) -> EngineStep | None:
    """Take the step out again, so that vLLM's loggers find what they know; None where none was sent."""
    carried = stats.kv_connector_stats
    if not carried or _STEP not in carried:
        return None
    stats.kv_connector_stats = None
    return EngineStep(*carried[_STEP])


def observation(
    report: WorkerReport,
    scheduled: SchedulerOutput,
    output: ModelRunnerOutput,
    requests: Mapping[str, Request],
    brought: Mapping[str, int],
) -> StepObservation:
    """Join the worker's report with the scheduler's view, before the scheduler books this step's tokens.

    A request decodes when it emits tokens and has emitted some before, other than those that a continued one `brought`;
    its drafts are the ones that were scheduled, its accepted drafts are what it emits less the bonus token.
    """
    ids: list[str] = []
    drafted: list[int] = []
    accepted: list[int] = []
    temperature: list[float] = []
    for request_id in scheduled.num_scheduled_tokens:
        request = requests.get(request_id)
        if request is None or request.sampling_params is None:
            continue
        if request.num_output_tokens == brought.get(request_id, 0):
            continue
        index = output.req_id_to_index.get(request_id)
        emitted = output.sampled_token_ids[index] if index is not None and output.sampled_token_ids else []
        if not emitted:
            continue
        ids.append(request_id)
        drafted.append(len(scheduled.scheduled_spec_decode_tokens.get(request_id, ())))
        accepted.append(len(emitted) - 1)
        temperature.append(request.sampling_params.temperature)
    kld, overlap = _positions(report, ids, drafted)
    return StepObservation(
        request_ids=tuple(ids),
        num_draft_tokens=np.array(drafted, dtype=np.int64),
        num_accepted_tokens=np.array(accepted, dtype=np.int64),
        kld=kld,
        overlap=overlap,
        temperature=np.array(temperature, dtype=np.float32),
        draft_step_ms=report.draft_step_ms,
        catch_up_ms=report.catch_up_ms,
        draft_ids=report.draft_ids,
        draft_top_prob=None if report.draft_top_prob is None else report.draft_top_prob.numpy(),
        draft_entropy=None if report.draft_entropy is None else report.draft_entropy.numpy(),
        step_ms=report.step_ms,
        num_tokens=scheduled.total_num_scheduled_tokens,
        has_prefill=len(ids) < len(scheduled.num_scheduled_tokens),
    )


def _positions(report: WorkerReport, ids: list[str], drafted: list[int]) -> tuple[Numbers, Numbers]:
    """Reorder the report's ragged positions to `ids`; NaN where the report lacks a request or counts other drafts."""
    total = sum(drafted)
    kld = np.full(total, np.nan, dtype=np.float32)
    overlap = kld.copy()
    if report.kld is None or report.overlap is None:
        return kld, overlap
    spans: dict[str, tuple[int, int]] = {}
    start = 0
    for request_id, length in zip(report.request_ids, report.num_draft_tokens, strict=True):
        spans[request_id] = (start, length)
        start += length
    target: list[int] = []
    source: list[int] = []
    start = 0
    for request_id, length in zip(ids, drafted, strict=True):
        begin, measured = spans.get(request_id, (0, -1))
        if measured == length:
            target += range(start, start + length)
            source += range(begin, begin + length)
        start += length
    kld[target] = report.kld.numpy()[source]
    overlap[target] = report.overlap.numpy()[source]
    return kld, overlap
