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
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from dsde.control.policies import build_policy
from dsde.engine.drafter import DraftRecord
from dsde.engine.transport import PolicyChange, WorkerReport, attach_report
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
        self._timer: _Timer | None = None
        self._change: PolicyChange | None = None
        runner.rejection_sampler = MeasuredRejectionSampler(
            runner.sampler, vllm_config.speculative_config, runner.device, on_verify=self._verifier.measure
        )
        tap_drafter(runner.drafter, self._drafts.add)
        runner.drafter.propose = self._timed(runner.drafter.propose)

    def change_policy(self, policy: str, settings: Mapping[str, Any]) -> None:
        build_policy(policy, settings, self._max_length)
        self._change = PolicyChange(policy, dict(settings))

    def attach(self, output: Any) -> Any:
        """Send this step's report home with `output`."""
        pending = _PendingReport(self._verifier, self._timer, self._change)
        self._verifier.forget()
        self._timer = self._change = None
        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportedOutput(output, pending)
        if isinstance(output, ModelRunnerOutput):
            attach_report(output, pending.report())
        return output

    def _timed(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        def timed_propose(*args: Any, **kwargs: Any) -> Any:
            self._drafts.begin(self._runner.input_batch.req_ids)
            timer = _Timer(self._runner.device)
            drafts = propose(*args, **kwargs)
            depth = drafts.shape[1] if isinstance(drafts, torch.Tensor) else max(map(len, drafts), default=0)
            self._timer = timer.stop(depth) if depth else None
            return drafts

        return timed_propose


class _Timer:
    """Time of one drafting, in ms per draft step; on a GPU it is read only after the step's copies arrived."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start: Any = self._mark()

    def stop(self, steps: int) -> _Timer:
        self._stop: Any = self._mark()
        self._steps = steps
        return self

    def step_ms(self) -> float:
        if not self._cuda:
            return (self._stop - self._start) * 1e3 / self._steps
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / self._steps

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _PendingReport:
    """A report whose tensors may still be on their way to the host."""

    def __init__(self, verifier: Verifier, timer: _Timer | None, change: PolicyChange | None) -> None:
        self._request_ids, self._num_draft_tokens = verifier.verified
        self._timer = timer
        self._change = change
        self._kld, self._overlap = verifier.kld, verifier.overlap
        self._arrived: Any = None
        if self._kld is not None and self._overlap is not None and self._kld.device.type == "cuda":
            self._kld = self._kld.to("cpu", non_blocking=True)
            self._overlap = self._overlap.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def report(self) -> WorkerReport:
        """Wait for the tensors and return the report."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return WorkerReport(
            request_ids=self._request_ids,
            num_draft_tokens=self._num_draft_tokens,
            kld=self._kld,
            overlap=self._overlap,
            draft_step_ms=None if self._timer is None else self._timer.step_ms(),
            policy_change=self._change,
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
