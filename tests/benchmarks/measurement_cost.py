"""What measuring KLD and overlap costs, as a share of the verification step it measures. Runs a real engine.

python tests/benchmarks/measurement_cost.py --pair embedded
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# A replica's share of the machine, as `dsde serve` gives it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", default="embedded", help="prepared pair: embedded, bench or bench-low (default: embedded)"
    )
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together (default: 8)")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens per request (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")
    arguments = parser.parse_args()

    from dsde.config import DsdeConfig
    from dsde.engine.plugin import engine_arguments, engine_environment

    config = DsdeConfig.model_validate(
        {
            "model": {"pair": arguments.pair, "max_model_len": 1024},
            "speculation": {
                "policy": "static",
                "settings": {"length": arguments.drafts},
                "max_length": arguments.drafts,
            },
            "engine": {"max_num_seqs": arguments.batch},
        }
    )
    for name, value in engine_environment(config).items():
        os.environ.setdefault(name, value)

    from vllm import LLM, SamplingParams

    engine = LLM(**engine_arguments(config), disable_log_stats=True)
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner, verifier = worker.model_runner, worker._speculation._verifier
    clock = Clock()
    runner.execute_model = clock.timed("verify", runner.execute_model)
    runner.sample_tokens = clock.timed("verify", runner.sample_tokens)
    runner.drafter.propose = clock.timed("draft", runner.drafter.propose)
    # The sampler holds the bound method, so it is replaced there.
    runner.rejection_sampler._on_verify = clock.timed("measure", verifier.measure)

    chats = [[{"role": "user", "content": f"Tell me something about the number {n}."}] for n in range(arguments.batch)]
    parameters = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.tokens, ignore_eos=True)
    steps: list[tuple[float, float]] = []
    clock.on_step = lambda spent: steps.append((spent["measure"], spent["verify"] - spent["draft"]))
    engine.chat(chats, parameters, use_tqdm=True)

    measured = [(cost, step) for cost, step in steps if cost > 0]
    result = {
        "pair": arguments.pair,
        "batch": arguments.batch,
        "drafts": arguments.drafts,
        "temperature": arguments.temperature,
        "steps": len(measured),
        "measure_ms": statistics.median(cost for cost, _ in measured),
        "verification_ms": statistics.median(step for _, step in measured),
        "share": statistics.median(cost / step for cost, step in measured),
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['steps']} verification steps: median {result['verification_ms']:.1f} ms, "
            f"measuring {result['measure_ms']:.2f} ms, share {100 * result['share']:.2f} %"
        )


class Clock:
    """Milliseconds spent per step under each name; a step ends with its sample_tokens call."""

    def __init__(self) -> None:
        self.on_step: Callable[[dict[str, float]], None] = lambda spent: None
        self._spent = {"verify": 0.0, "draft": 0.0, "measure": 0.0}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        ends_step = call.__name__ == "sample_tokens"

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self._spent[name] += (time.perf_counter() - start) * 1e3
            if ends_step:
                self.on_step(self._spent)
                self._spent = dict.fromkeys(self._spent, 0.0)
            return result

        return timed_call


if __name__ == "__main__":
    main()
