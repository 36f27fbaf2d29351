"""Alarms: each fails when vLLM changes, or repairs, a place that dsde/engine/vllm_internals.py touches."""

from __future__ import annotations

import inspect
from importlib import metadata
from typing import Any

import pytest
import torch
import vllm

from dsde.engine import vllm_internals


def test_version_is_the_one_the_module_was_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_internals.require_supported_vllm()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.0 is installed.*knows 0\.32\.0 only"):
        vllm_internals.require_supported_vllm()


def test_the_vllm_command_finds_its_version() -> None:
    assert metadata.version("vllm").split("+")[0] == vllm_internals.SUPPORTED_VLLM


def test_rejection_sampler_still_decides_in_one_module_level_step() -> None:
    from vllm.v1.sample import rejection_sampler

    parameters = list(inspect.signature(rejection_sampler.rejection_sample).parameters)
    assert parameters[:6] == [
        "draft_token_ids",
        "num_draft_tokens",
        "max_spec_len",
        "cu_num_draft_tokens",
        "draft_probs",
        "target_logits",
    ]
    forward = inspect.getsource(rejection_sampler.RejectionSampler.forward)
    assert forward.count("rejection_sample(") == 1
    assert forward.index("apply_sampling_constraints(") < forward.index("rejection_sample(")


def test_drafter_still_samples_through_the_tapped_methods() -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    # Twice in propose: for the first draft token and for the ones after it; a third for the single-token shortcut.
    assert inspect.getsource(SpecDecodeBaseProposer.propose).count("self._sample_draft_tokens(") == 3
    assert list(inspect.signature(SpecDecodeBaseProposer._sample_draft_tokens).parameters) == [
        "self",
        "hidden_states",
        "sampling_metadata",
    ]
    assert list(inspect.signature(SpecDecodeBaseProposer._sample_from_logits).parameters) == [
        "self",
        "logits",
        "sampling_metadata",
    ]


SCHEDULER = (
    "_free_request",
    "_preempt_request",
    "_update_after_schedule",
    "_update_request_with_output",
    "make_stats",
    "update_draft_token_ids",
    "update_from_output",
)
RUNNER = (
    "self._draft_probs",
    "self._draft_prob_req_ids",
    "self.drafter.propose(",
    "self.propose_draft_token_ids(",
    "self.rejection_sampler(",
    "self.kv_cache_config",
    "self.input_batch.num_computed_tokens_cpu",
    "self.input_ids.gpu[",
    "self.discard_request_mask.gpu",
    "self.use_async_scheduling",
    "self.drafter.prepare_next_token_ids_padded(",
    "def _copy_valid_sampled_token_count(",
)


def test_the_private_names_that_the_plugin_overrides_or_reads_are_there() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert [name for name in SCHEDULER if name not in vars(Scheduler)] == []
    assert "self.dynamic_sd_lookup" in inspect.getsource(Scheduler.__init__)
    runner = inspect.getsource(GPUModelRunner)
    assert [name for name in RUNNER if name not in runner] == []
    proposer = inspect.getsource(SpecDecodeBaseProposer)
    assert [
        name for name in ("self._last_draft_probs", "self.kv_cache_gid", "self.input_ids") if name not in proposer
    ] == []


def test_asynchronous_steps_still_know_their_positions_before_they_draft() -> None:
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    # Once the forward is launched, positions are corrected for the drafts that the step before rejected.
    execute = inspect.getsource(GPUModelRunner.execute_model)
    assert execute.rindex("deferred_state_corrections_fn()") > execute.rindex("self.execute_model_state =")
    # A step that verified nothing hands its tokens on without the drafter; one that did needs the drafter's counts.
    bookkeeping = inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "if self.input_batch.prev_sampled_token_ids is None:\n                assert" in bookkeeping
    assert "self.input_batch.prev_sampled_token_ids = sampled_token_ids" in bookkeeping
    table = inspect.getsource(BlockTable.__init__)
    assert all(name in table for name in ("self.block_size", "self.block_table", "self.slot_mapping"))


def test_statistics_still_have_a_field_that_only_kv_connectors_use() -> None:
    from vllm.v1.metrics import loggers
    from vllm.v1.metrics.stats import SchedulerStats

    assert SchedulerStats().kv_connector_stats is None
    manager = inspect.getsource(loggers.StatLoggerManager.__init__)
    # Ours must hear of a step before a logger that does not know what it carries.
    assert manager.index("extend(custom_stat_loggers)") < manager.index("append(default_logger_factory)")


def test_mended_expand_is_right_and_the_original_still_needs_mending(start_engine: Any) -> None:
    start_engine()  # vLLM registers its CPU stand-ins when a worker starts
    x = torch.tensor([0.5, 0.0, 2.0])
    cumulative = torch.tensor([2, 2, 5], dtype=torch.int32)
    expected = [0.5, 0.5, 2.0, 2.0, 2.0]
    mended = vllm_internals._expand_batch_to_tokens(x, cumulative, 5, replace_from=0, replace_to=1)
    assert mended.tolist() == expected
    replaced = vllm_internals._expand_batch_to_tokens(torch.tensor([0.0, 3.0]), torch.tensor([1, 2]), 2, 0, 1)
    assert replaced.tolist() == [1.0, 3.0]

    wrong = vllm_internals._expand_batch_to_tokens.__wrapped__(x, cumulative, 5, replace_from=0, replace_to=1)
    assert wrong.tolist() != expected, "vLLM repaired vllm-project/vllm#55005: drop mend_cpu_expand()"
