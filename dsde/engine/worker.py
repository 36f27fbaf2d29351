"""The vLLM worker that measures each verification and sends the measurement home; CPU and GPU.

Name it as vLLM's `worker_cls`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from dsde.control.policies import build_policy
from dsde.control.records import SpeculationPlan
from dsde.engine.catchup import CatchUp
from dsde.engine.drafter import DraftEnded, DraftRecord
from dsde.engine.transport import PolicyChange, WorkerReport, attach_report, plan_of
from dsde.engine.verifier import Verifier
from dsde.engine.vllm_internals import MeasuredRejectionSampler, mend_cpu_expand, require_supported_vllm, tap_drafter

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

__all__ = ["DsdeWorker"]


class DsdeWorker(_Worker):
    """vLLM's worker with DSDE's measurements; without a drafter it is vLLM's worker."""

    _speculation: _Measurement | None = None

    def init_device(self) -> None:
        require_supported_vllm()
        if current_platform.is_cpu():
            mend_cpu_expand()
        super().init_device()
        if self.vllm_config.speculative_config is not None:
            self._speculation = _Measurement(self.vllm_config, self.model_runner)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if self._speculation is not None:
            self._speculation.begin(scheduler_output)
        output = super().execute_model(scheduler_output)
        if self._speculation is not None:
            self._speculation.launched()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        return output if self._speculation is None else self._speculation.attach(output)

    def set_speculation_policy(self, policy: str, settings: Mapping[str, Any] | None = None) -> None:
        """Make `policy` the default of all requests that did not choose one; call it through vLLM's collective_rpc.

        It reaches the controller with the next step's output, so it holds from the step after. Raises ValueError naming
        the setting, its value and what is accepted; RuntimeError for an engine without a drafter.
        """
        if self._speculation is None:
            raise RuntimeError(f"speculation policy {policy!r} cannot be set: this engine has no draft model")
        self._speculation.change_policy(policy, settings or {})


class _Measurement:
    """One worker's taps on its model runner: drafter, rejection sampler and clock."""

    def __init__(self, vllm_config: VllmConfig, runner: Any) -> None:
        self._max_length = vllm_config.num_speculative_tokens
        self._runner = runner
        self._drafts = DraftRecord()
        self._verifier = Verifier(self._drafts, request_ids=lambda: runner.input_batch.req_ids)
        self._plan = SpeculationPlan()
        self._has_drafted = False
        self._verification: _Timer | None = None
        self._drafting: _Timer | None = None
        self._catching_up: _Timer | None = None
        self._change: PolicyChange | None = None
        # Elsewhere vLLM's one draft forward per step keeps the drafter in step, speculating or not.
        self._catch_up = CatchUp(runner) if runner.speculative_config.uses_draft_model() else None
        runner.rejection_sampler = MeasuredRejectionSampler(
            runner.sampler, vllm_config.speculative_config, runner.device, on_verify=self._verifier.measure
        )
        tap_drafter(runner.drafter, self._drafts.add)
        runner.drafter.propose = self._drafted(runner.drafter.propose)
        runner.propose_draft_token_ids = self._planned(runner.propose_draft_token_ids)

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Start an engine step."""
        self._plan = plan_of(scheduled) or SpeculationPlan(depth=scheduled.num_spec_tokens_to_schedule)
        self._drafting = self._catching_up = None
        if not self._has_drafted:
            self._drafts.begin((), SpeculationPlan())
        self._has_drafted = False
        self._verification = _Timer(self._runner.device) if scheduled.total_num_scheduled_tokens else None
        if self._catch_up is not None:
            self._catch_up.begin(scheduled)

    def launched(self) -> None:
        """Go on after the target's forward pass was launched."""
        if self._catch_up is not None:
            self._catch_up.launched()

    def change_policy(self, policy: str, settings: Mapping[str, Any]) -> None:
        build_policy(policy, settings, self._max_length)
        self._change = PolicyChange(policy, dict(settings))

    def attach(self, output: Any) -> Any:
        """Send this step's report home with `output`."""
        if self._catch_up is not None:
            self._catch_up.end()
        if self._verification is not None and not self._verification.stopped:
            self._verification.stop()
        drafts = self._drafts if self._has_drafted else None
        behind = () if self._catch_up is None else self._catch_up.left_behind
        pending = _PendingReport(
            self._verifier, drafts, self._verification, self._drafting, self._catching_up, self._change, behind
        )
        self._verifier.forget()
        self._change = None
        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportedOutput(output, pending)
        if isinstance(output, ModelRunnerOutput):
            attach_report(output, pending.report())
        return output

    def _planned(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        def planned_propose(scheduled: SchedulerOutput, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if self._verification is not None:
                self._verification.stop()
            # A step of prompt chunks alone plans nothing, and the draft reads them as they come.
            if self._plan.depth == 0 and self._plan.lengths and self._catch_up is not None:
                return self._catch_up.rest(sampled_token_ids)
            return propose(scheduled, sampled_token_ids, *args, **kwargs)

        return planned_propose

    def _drafted(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        drafter = self._runner.drafter

        def drafted_propose(*args: Any, **kwargs: Any) -> Any:
            if self._catch_up is not None:
                kwargs = self._catch_up.widen(kwargs, self._plan)
            self._drafts.begin(self._runner.input_batch.req_ids, self._plan)
            self._has_drafted = True
            timer = _Timer(self._runner.device)
            try:
                drafts = propose(*args, **kwargs)
            except DraftEnded:
                drafts = self._drafts.tokens
                drafter._last_draft_probs = self._drafts.probs
            depth = drafts.shape[1] if isinstance(drafts, torch.Tensor) else max(map(len, drafts), default=0)
            if self._catch_up is not None and self._catch_up.read_more:
                # Reading a backlog or a prompt is no draft step.
                self._catching_up = timer.stop() if self._catch_up.read_backlog else None
            elif depth:
                self._drafting = timer.stop(depth)
            return drafts

        return drafted_propose


class _Timer:
    """Time between two marks in ms; on a GPU it is read only after the step's copies arrived."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stop: Any = None
        self._parts = 1
        self._start: Any = self._mark()

    @property
    def stopped(self) -> bool:
        return self._stop is not None

    def stop(self, parts: int = 1) -> _Timer:
        """Set the second mark; `parts` equal parts lie between the two."""
        self._stop = self._mark()
        self._parts = parts
        return self

    def ms(self) -> float:
        """Time of one part."""
        if not self._cuda:
            return (self._stop - self._start) * 1e3 / self._parts
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / self._parts

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _PendingReport:
    """A report whose tensors may still be on their way to the host."""

    def __init__(
        self,
        verifier: Verifier,
        drafts: DraftRecord | None,
        verification: _Timer | None,
        drafting: _Timer | None,
        catching_up: _Timer | None,
        change: PolicyChange | None,
        left_behind: tuple[str, ...],
    ) -> None:
        self._request_ids, self._num_draft_tokens = verifier.verified
        self._verification = verification
        self._drafting = drafting
        self._catching_up = catching_up
        self._change = change
        self._left_behind = left_behind
        drafts = drafts or DraftRecord()
        self._draft_ids = drafts.request_ids
        tensors = (verifier.kld, verifier.overlap, drafts.top_prob, drafts.entropy)
        self._tensors = [None if tensor is None else tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived: Any = None
        if any(tensor is not None and tensor.device.type == "cuda" for tensor in tensors):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def report(self) -> WorkerReport:
        """Wait for the tensors and return the report."""
        if self._arrived is not None:
            self._arrived.synchronize()
        kld, overlap, top_prob, entropy = self._tensors
        return WorkerReport(
            request_ids=self._request_ids,
            num_draft_tokens=self._num_draft_tokens,
            kld=kld,
            overlap=overlap,
            draft_step_ms=None if self._drafting is None else self._drafting.ms(),
            catch_up_ms=None if self._catching_up is None else self._catching_up.ms(),
            draft_ids=self._draft_ids,
            draft_top_prob=top_prob,
            draft_entropy=entropy,
            step_ms=None if self._verification is None else self._verification.ms(),
            policy_change=self._change,
            left_behind=self._left_behind,
        )


class _ReportedOutput(AsyncModelRunnerOutput):
    """vLLM's asynchronous output with the report attached once it is read."""

    def __init__(self, output: AsyncModelRunnerOutput, pending: _PendingReport) -> None:
        self._output = output
        self._pending = pending

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        attach_report(output, self._pending.report())
        return output
