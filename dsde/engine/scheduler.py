"""The vLLM schedulers that own the controller and apply its plan request by request.

Name one of them as vLLM's `scheduler_cls`: DsdeScheduler for synchronous scheduling (CPU), DsdeAsyncScheduler for
asynchronous scheduling (vLLM's default on GPUs). Policy and settings come from `additional_config["dsde"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dsde.control.controller import Controller
from dsde.control.policies import DEFAULT_POLICY
from dsde.control.records import RequestSpeculation, SpeculationPlan
from dsde.engine.events import Event, Events
from dsde.engine.options import RequestOptions, parse
from dsde.engine.tally import Tally
from dsde.engine.transport import (
    ENGINE_KEY,
    EVENTS_KEY,
    FIGURES_KEY,
    attach_plan,
    attach_step,
    engine_costs,
    observation,
    plan_of,
    report_of,
)
from dsde.engine.vllm_internals import require_supported_vllm
from dsde.telemetry.tracing import is_sampled

__all__ = ["DsdeAsyncScheduler", "DsdeScheduler"]

logger = init_logger("vllm.dsde.scheduler")


class _Speculation(Scheduler):
    """What both schedulers share: plan after scheduling, observe before booking, report when a request ends."""

    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_supported_vllm()
        super().__init__(*args, **kwargs)
        if self.num_spec_tokens == 0:
            raise ValueError(
                f"scheduler_cls {type(self).__name__} needs a draft: set speculative_config or leave scheduler_cls out"
            )
        if self.parallel_config.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size {self.parallel_config.data_parallel_size} is not supported: data-parallel ranks "
                "would draft to different lengths; serve more replicas instead"
            )
        if self.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size {self.parallel_config.pipeline_parallel_size} is not supported: only the last "
                "stage drafts; use tensor parallelism instead"
            )
        settings = dict((self.vllm_config.additional_config or {}).get("dsde", {}))
        self.controller = Controller(
            settings.get("policy", DEFAULT_POLICY),
            settings.get("settings", {}),
            capacity=self.max_num_running_reqs,
            max_length=self.num_spec_tokens,
            trims=not self.scheduler_config.async_scheduling,
        )
        speculative = self.vllm_config.speculative_config
        draft = speculative.draft_model_config if speculative is not None else None
        self._draft_max_len = draft.max_model_len if draft is not None else self.max_model_len
        # Lengths vary, so vLLM must not pad new decodes to the longest; with a schedule of its own it does not.
        if self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._plan = SpeculationPlan()
        self._left_behind: set[str] = set()
        # Nobody under plain `vllm serve` would read them.
        self._sends_steps = bool(settings.get("telemetry", False))
        self._tally = Tally()
        self._events = Events(self.controller)

    def add_request(self, request: Request) -> None:
        new = request.request_id not in self.requests
        super().add_request(request)
        if new and request.sampling_params is not None:
            options = self._options(request)
            self.controller.admit(request.request_id, policy=options.policy, max_length=options.max_length)
            if self._sends_steps and is_sampled(request.trace_headers):
                self._events.admit(request.request_id)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        report = report_of(model_runner_output)
        # A report may come after its request has ended, or lost the blocks that it speaks of.
        self._left_behind.update(
            i for i in report.left_behind if (r := self.requests.get(i)) and r.status == RequestStatus.RUNNING
        )
        if report.policy_change is not None:
            self.controller.set_policy(report.policy_change.policy, report.policy_change.settings)
        observed = observation(report, scheduler_output, model_runner_output, self.requests)
        with self._tally:
            self.controller.observe(observed, plan_of(scheduler_output))
        self._tally.observed(observed)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for batch in outputs.values():
            for output in batch.outputs:
                self._attach_running_figures(output)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._sends_steps:
            attach_step(stats, self._tally.take(self.controller.policy.name))
        return stats

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        drafting = [
            request
            for request in map(self.requests.__getitem__, scheduler_output.num_scheduled_tokens)
            if not request.is_prefill_chunk and request.sampling_params is not None
        ]
        room = [0] * len(drafting)
        scheduled = map(self.requests.__getitem__, scheduler_output.num_scheduled_tokens)
        # Past the draft's context vLLM drafts for nobody in the batch (vllm-project/vllm#58080).
        fits = all(request.num_computed_tokens + self.num_spec_tokens <= self._draft_max_len for request in scheduled)
        if fits:
            room = [self._room(request, in_flight=1) for request in drafting]
        with self._tally:
            self._plan = self.controller.plan([request.request_id for request in drafting], room)
        self._tally.planned(self._plan, room, fits)
        self._events.planned(self._plan)
        scheduler_output.num_spec_tokens_to_schedule = self._plan.depth
        attach_plan(scheduler_output, self._plan)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        emitted = len(new_token_ids)
        kept, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        self._tally.cut(emitted, len(kept))
        metrics = request.spec_decode_metrics
        # An end inside the accepted drafts drops tokens that vLLM has counted as accepted (vllm-project/vllm#56101).
        if metrics is not None and emitted > max(len(kept), 1):
            metrics.histogram[emitted - 1] -= 1
            metrics.histogram[len(kept)] += 1
            if metrics.per_step_accepted:
                metrics.per_step_accepted[-1] = len(kept)
        return kept, stopped

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.controller.preempt(request.request_id)
        self._left_behind.discard(request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        kv_transfer_params, ec_transfer_params = super()._free_request(request, *args, **kwargs)
        self._left_behind.discard(request.request_id)
        figures = self.controller.finish(request.request_id)
        events = self._events.finish(request.request_id)
        if figures is not None:
            kv_transfer_params = {**(kv_transfer_params or {}), **self._carried(figures, events)}
        return kv_transfer_params, ec_transfer_params

    def _may_draft(self, request: Request) -> bool:
        """Whether drafts leave this request's distribution as it is."""
        return True

    def _room(self, request: Request, in_flight: int) -> int:
        """Draft tokens this request can still use: the answer's remaining tokens, less the bonus token."""
        if request.request_id in self._left_behind or not self._may_draft(request):
            return 0
        written = request.num_output_tokens + in_flight
        left = min(request.max_tokens - written, self.max_model_len - request.num_prompt_tokens - written)
        return max(0, left - 1)

    def _carried(self, figures: RequestSpeculation, events: Sequence[Event]) -> dict[str, Any]:
        """What a finished request brings to the front end."""
        costs = engine_costs(self.controller, len(self.running))
        carried = {FIGURES_KEY: figures.to_dict(), ENGINE_KEY: costs}
        return {**carried, EVENTS_KEY: events} if events else carried

    def _attach_running_figures(self, output: Any) -> None:
        """Send what a finished request brings at every step, where a stop string may end it outside the engine."""
        request = self.requests.get(output.request_id)
        if (
            request is None
            or output.finish_reason is not None
            or not (request.sampling_params and request.sampling_params.stop)
        ):
            return
        figures = self.controller.snapshot(output.request_id)
        if figures is not None:
            output.spec_decode_metrics = request.spec_decode_metrics
            output.kv_transfer_params = self._carried(figures, self._events.of(output.request_id))

    def _options(self, request: Request) -> RequestOptions:
        assert request.sampling_params is not None
        try:
            return parse(request.sampling_params.extra_args, self.num_spec_tokens)
        except VLLMValidationError as error:
            # dsde's front end refuses these with a 400; under plain `vllm serve` an error here would end the engine.
            logger.warning("request %s: %s; the engine's policy applies", request.request_id, error)
            return RequestOptions()


class DsdeScheduler(_Speculation):
    """Synchronous scheduling: drafts come back before the next step, so each request's list is cut to its length."""

    def _may_draft(self, request: Request) -> bool:
        # vLLM drops the drafts that a grammar forbids, which depends on the very tokens drawn: at a temperature above 0
        # what replaces them would not follow the target's distribution.
        sampled = request.sampling_params is not None and request.sampling_params.temperature > 0
        return not (request.use_structured_output and sampled)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        ids = draft_token_ids.req_ids
        room = {i: self._room(self.requests[i], in_flight=0) for i in ids if i in self.requests}
        with self._tally:
            lengths = self.controller.trim(self._plan, room).lengths
        drafts = [tokens[: lengths.get(i, 0)] for i, tokens in zip(ids, draft_token_ids.draft_token_ids, strict=True)]
        super().update_draft_token_ids(DraftTokenIds(ids, drafts))


class DsdeAsyncScheduler(_Speculation, AsyncScheduler):
    """Asynchronous scheduling: drafts stay on the device, so each request's placeholder list carries its length.

    No trim() follows the drafting. The host shapes and launches the next forward pass before the drafter has said how
    sure it is; to read that first, it would have to wait for the device at every step, which asynchronous scheduling is
    there to avoid. Masking drafts on the device would save nothing: the pass would be as wide. So lengths are what pays
    by what is known before drafting. Depth 0 needs no such knowledge, and lets the drafter rest as it does elsewhere.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placeholders = [[-1] * length for length in range(self.num_spec_tokens + 1)]

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                request.spec_token_ids = self._placeholders[self._plan.lengths.get(request_id, 0)]
