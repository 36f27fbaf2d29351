from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from dsde.bench.cell import Counts
from dsde.bench.engines import add_step, check_memory, engine_config, environment
from dsde.bench.progress import duration
from dsde.config import DsdeConfig
from dsde.control.records import SpeculationPlan, StepObservation


def observation(
    drafted: list[int], accepted: list[int], top_prob: np.ndarray | None, ids: tuple[str, ...]
) -> StepObservation:
    count = sum(drafted)
    return StepObservation(
        request_ids=tuple("abc"[: len(drafted)]),
        num_draft_tokens=np.array(drafted),
        num_accepted_tokens=np.array(accepted),
        kld=np.zeros(count, dtype=np.float32),
        overlap=np.ones(count, dtype=np.float32),
        temperature=np.zeros(len(drafted), dtype=np.float32),
        draft_ids=ids,
        draft_top_prob=top_prob,
    )


def test_a_step_is_counted_as_drafted_not_as_planned() -> None:
    counts = Counts()
    plan = SpeculationPlan(4, {"a": 4, "b": 2, "c": 0})
    add_step(counts, observation([4, 2, 0], [3, 2, 0], np.ones((3, 2), dtype=np.float32), ("a", "b", "c")), plan)
    # Drafting ended after 2 of 4 steps: 6 slots; 2 requests verified 6 drafts and kept 5.
    assert counts == Counts(steps=1, drafting=2, verified=6, accepted=5, slots=6, draft_steps=2)
    add_step(counts, observation([0, 0], [0, 0], None, ()), SpeculationPlan())
    assert counts == Counts(steps=2, drafting=2, verified=6, accepted=5, slots=6, draft_steps=2)
    # A drafter without distributions says who drafted, and the plan how deep.
    add_step(counts, observation([1], [0], None, ("a",)), SpeculationPlan(1, {"a": 1}))
    assert counts.slots == 7


def test_one_engine_at_a_time_gets_all_cores() -> None:
    wanted = environment(DsdeConfig.model_validate({}))
    assert wanted["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=32
    )
    for name in ("target", "draft"):
        LlamaForCausalLM(shape).save_pretrained(tmp_path / name)
    return str(tmp_path / "target"), str(tmp_path / "draft")


def test_the_cache_holds_the_batch_and_the_memory_is_checked(models: tuple[str, str]) -> None:
    base = DsdeConfig.model_validate({"model": {"max_model_len": 256}})
    config = engine_config(base, *models, batch=24, written=24 * 32)
    assert config.engine.max_num_seqs == 24
    assert config.speculation.max_length == 10
    # K and V of two one-layer models, 32 values of 2 bytes each: 256 bytes a token; 24 * (128 + 32 + 64) tokens.
    assert config.engine.kv_cache_gib == pytest.approx(24 * 224 * 256 / 2**30, rel=1e-3)
    check_memory({"high": config, "low": config}, available_gib=3.0)
    with pytest.raises(RuntimeError, match=r"about 2\.2 GiB of memory are needed, 1\.0 GiB are available: 3 engines "):
        check_memory({"high": config, "low": config}, available_gib=1.0)


def test_a_duration_is_said_as_people_say_it() -> None:
    assert [duration(s) for s in (50.2, 89.4, 400, 7500)] == ["50 s", "89 s", "7 min", "2 h 05 min"]
