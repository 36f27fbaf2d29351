"""The engines under test, all in this process, and one run of a contender on one of them.

In-process the controller is within reach: each contender has one of its own, which takes its place before a run, so
that what a policy learns it learns from its own runs, and keeps for its next ones.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsde.bench.cell import Counts, Run
from dsde.bench.contender import LONGEST, Contender
from dsde.bench.workload import Prompt, Question
from dsde.config import DsdeConfig
from dsde.control.records import SpeculationPlan, StepObservation

__all__ = ["Engine", "OnStep", "check_memory", "engine_config", "environment"]

OnStep = Callable[[StepObservation, SpeculationPlan | None], None]

_GIB = 2**30
_ids = itertools.count()
# Prompt tokens of the longest chat, template included, with room for the tokens of a step beyond a run's share.
PROMPT_TOKENS = 128
MAX_MODEL_LEN = 2048
# Small blocks let the repeated prompts of a round come from the prefix cache; vLLM's CPU default is 128.
CPU_BLOCK_SIZE = 32
# Beside weights and KV cache, of the process and of each engine; two engines of the embedded pair peaked at 4.2 GiB.
PROCESS_GIB = 1.0
ENGINE_GIB = 0.4


def environment(config: DsdeConfig) -> dict[str, str]:
    """Environment of the benchmark's process: one engine at a time computes, with all cores, in this process."""
    from dsde.engine.plugin import engine_environment

    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "CRITICAL", "TQDM_DISABLE": "1"}
    cores = str(len(os.sched_getaffinity(0)))
    threads = {"OMP_NUM_THREADS": cores} if config.serving.device == "cpu" else {}
    return {**engine_environment(config), **threads, **quiet}


def engine_config(config: DsdeConfig, target: str, draft: str, batch: int, written: int) -> DsdeConfig:
    """The configuration of an engine that decodes at most `batch` requests, and `written` tokens in a run.

    The KV cache is sized for exactly that: the requests share the tokens, however unevenly.
    """
    from dsde.models.check import footprint

    section = config.model_dump()
    section["model"] |= {"target": target, "draft": draft, "max_model_len": config.model.max_model_len or MAX_MODEL_LEN}
    section["speculation"] |= {"policy": "static", "settings": {}, "max_length": LONGEST}
    section["engine"] |= {"max_num_seqs": batch, "kv_cache_gib": 1.0}
    sized = DsdeConfig.model_validate(section)
    if config.serving.device == "cpu":
        held = batch * (PROMPT_TOKENS + 2 * CPU_BLOCK_SIZE) + written
        held = max(held, section["model"]["max_model_len"] + CPU_BLOCK_SIZE)
        per_token = _GIB / footprint(sized, target, draft).tokens_held
        section["engine"]["kv_cache_gib"] = held * per_token / _GIB
        sized = DsdeConfig.model_validate(section)
    return sized


def check_memory(configs: Mapping[str, DsdeConfig], available_gib: float | None = None) -> None:
    """All CPU engines fit at once: those of `configs`, draft -> its engine, and one of the target alone.

    Raises RuntimeError with the numbers and what to leave out.
    """
    if any(config.serving.device != "cpu" for config in configs.values()):
        return
    from dsde.engine.plugin import model_paths
    from dsde.models.check import footprint

    if available_gib is None:
        import psutil

        available_gib = psutil.virtual_memory().available / _GIB
    needs = [footprint(config, *model_paths(config)) for config in configs.values()]
    # The engine without a drafter is counted as large as one with: its draft's weights are small beside the target's.
    needs.append(needs[0])
    need = PROCESS_GIB + sum(one.weights_gib + one.kv_cache_gib + ENGINE_GIB for one in needs)
    if need > available_gib:
        raise RuntimeError(
            f"about {need:.1f} GiB of memory are needed, {available_gib:.1f} GiB are available: {len(needs)} engines "
            f"(the target alone, and with {' and '.join(configs)} draft), each {needs[0].weights_gib:.1f} for weights, "
            f"{needs[0].kv_cache_gib:.1f} for the KV cache and {ENGINE_GIB} besides, "
            f"{PROCESS_GIB} for the process; choose fewer drafts (--draft), "
            "smaller batches (--batch) or fewer tokens (--tokens)"
        )


class Engine:
    """One vLLM engine in this process: with a drafter under DSDE's controller, or the target alone.

    config: engine_config()'s. plain: leave out drafter and plugin, so the engine is stock vLLM.
    further: vLLM engine arguments laid over the rest.
    """

    def __init__(self, config: DsdeConfig, *, plain: bool = False, further: Mapping[str, Any] | None = None) -> None:
        from vllm import LLM

        from dsde.engine.plugin import engine_arguments

        arguments = engine_arguments(config)
        if plain:
            ours = ("scheduler_cls", "worker_cls", "speculative_config", "per_request_spec_decode_metrics")
            arguments = {name: value for name, value in arguments.items() if name not in (*ours, "additional_config")}
        if config.serving.device == "cpu":
            arguments["block_size"] = CPU_BLOCK_SIZE
        arguments |= {"disable_log_stats": True, "use_tqdm_on_load": False, **(further or {})}
        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._max_model_len = self._engine.model_config.max_model_len
        self._live: dict[str, int] = {}
        self._counts: Counts | None = None
        self._on_step: OnStep | None = None
        self._confidence = False
        core: Any = self._engine.engine_core
        self._scheduler: Any = None if plain else core.engine_core.scheduler
        self._unused: Any = None if plain else core.engine_core.scheduler.controller
        self._controllers: dict[str, Any] = {}

    def encode(self, questions: Sequence[Question]) -> list[Prompt]:
        """Questions in the model's own chat template."""
        tokenizer = self._llm.get_tokenizer()
        prompts = []
        for workload, chat in questions:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompts.append(Prompt(workload, tokenizer.encode(text, add_special_tokens=False)))
        return prompts

    def choose(self, contender: Contender) -> None:
        """Bring the contender's controller in, a fresh one at first. Only between runs; the plain engine has none."""
        if self._scheduler is None:
            return
        if contender.label not in self._controllers:
            controller = copy.deepcopy(self._unused)
            controller.observe = self._observer(controller.observe)
            controller.plan = self._planner(controller.plan)
            self._controllers[contender.label] = controller
        self._scheduler.controller = self._controllers[contender.label]
        self._scheduler.controller.set_policy(contender.policy, contender.settings)

    def run(
        self,
        prompts: Sequence[Prompt],
        load: Sequence[int],
        tokens: float,
        temperature: float,
        on_step: OnStep | None = None,
        *,
        waves: int = 1,
        confidence: bool = False,
    ) -> Run:
        """Decode with a full batch of load[0] requests, then load[1] and so on, `tokens` per request on average each.

        A request joins with the next of `prompts`, leaves when the load falls, and never ends by itself. Only decoding
        with every request past its prompt is measured; the last step counts for the part that was needed.
        waves: how often, each time with the next of `prompts`; the latency is then the mean.
        on_step: called with the observation and the plan of each measured step; engines with a drafter only. A
        request's id there begins with its prompt's workload and a dash. confidence: measure the drafter's confidence
        for everybody, which takes time, so such a run says nothing about speed.
        """
        waiting = iter(itertools.cycle(prompts))
        total = seconds = latency = 0.0
        counts = Counts()
        self._confidence = confidence
        try:
            for _ in range(waves):
                self._leave(list(self._live))
                for batch in load:
                    self._fill(batch, waiting, temperature)
                    self._counts, self._on_step = Counts(), on_step
                    spent, written = self._decode(batch, tokens, waiting, temperature)
                    counts += self._counts
                    total += batch * tokens
                    seconds += spent
                    latency += sum(spent * tokens / count for count in written.values()) / len(written) / waves
        finally:
            self._counts = self._on_step = None
            self._leave(list(self._live))
        return Run(total, seconds, latency, counts)

    def shutdown(self) -> None:
        """End the engine; it must be done before another one's end is left to the interpreter."""
        self._engine.engine_core.shutdown()
        gc.collect()

    def _fill(self, batch: int, waiting: Any, temperature: float) -> None:
        """Bring the batch to `batch` requests, each with its first token out; the clock stands still."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        counts, self._counts = self._counts, None
        self._leave(list(self._live)[batch:])
        while len(self._live) < batch:
            workload, token_ids = next(waiting)
            parameters = SamplingParams(
                temperature=temperature,
                max_tokens=self._max_model_len - len(token_ids),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            request = f"{workload}-{next(_ids)}"
            self._engine.add_request(request, {"prompt_token_ids": list(token_ids)}, parameters)
            self._live[request] = 0
        while not all(self._live.values()):
            self._step()
        self._counts = counts

    def _decode(self, batch: int, tokens: float, waiting: Any, temperature: float) -> tuple[float, dict[str, float]]:
        """(seconds, tokens written by each request) until the batch has written batch * tokens."""
        written: dict[str, float] = {}
        goal, seconds, emitted = batch * tokens, 0.0, 0.0
        while emitted < goal:
            if len(self._live) < batch:
                # One reached the model's length: only full batches are measured.
                self._fill(batch, waiting, temperature)
            start = time.perf_counter()
            new = self._step()
            spent = time.perf_counter() - start
            count = sum(new.values())
            share = min(1.0, (goal - emitted) / count) if count else 1.0
            for request, own in new.items():
                written[request] = written.get(request, 0.0) + share * own
            emitted += share * count
            seconds += share * spent
        return seconds, written

    def _step(self) -> dict[str, int]:
        """One engine step: request -> tokens it wrote."""
        new: dict[str, int] = {}
        for output in self._engine.step():
            new[output.request_id] = sum(len(one.token_ids) for one in output.outputs)
            self._live[output.request_id] += new[output.request_id]
            if output.finished:
                del self._live[output.request_id]
        return new

    def _leave(self, requests: list[str]) -> None:
        if requests:
            self._engine.abort_request(requests)
        for request in requests:
            del self._live[request]

    def _planner(self, plan: Callable[..., SpeculationPlan]) -> Callable[..., SpeculationPlan]:
        """A controller's plan(), with the drafter's confidence asked for where the run wants it."""

        def planned(*args: Any, **kwargs: Any) -> SpeculationPlan:
            made = plan(*args, **kwargs)
            return replace(made, confidence=True) if self._confidence and made.depth else made

        return planned

    def _observer(self, observe: Callable[..., None]) -> Callable[..., None]:
        """A controller's observe(), counted while the clock runs."""

        def counted(observation: StepObservation, plan: SpeculationPlan | None = None) -> None:
            observe(observation, plan)
            if self._counts is not None:
                add_step(self._counts, observation, plan)
                if self._on_step is not None:
                    self._on_step(observation, plan)

        return counted


def add_step(counts: Counts, observation: StepObservation, plan: SpeculationPlan | None) -> None:
    """Add one step to `counts`; where the drafting ended before the plan's depth, it counts as far as it went."""
    verified = observation.num_draft_tokens
    counts.steps += 1
    counts.drafting += int((verified > 0).sum())
    counts.verified += int(verified.sum())
    counts.accepted += int(observation.num_accepted_tokens[verified > 0].sum())
    if not observation.draft_ids or plan is None:
        return
    depth = plan.depth if observation.draft_top_prob is None else observation.draft_top_prob.shape[1]
    counts.draft_steps += depth
    counts.slots += depth * len(observation.draft_ids)
