"""What a step without drafts costs: an engine whose drafter rests and one without a drafter take turns.

python -m tests.benchmarks.off_step --scheduling asynchronous --batch 8
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# A replica's share of the machine, as `dsde serve` gives it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="embedded", help="prepared pair (default: embedded)")
    parser.add_argument(
        "--scheduling", choices=["synchronous", "asynchronous"], default="asynchronous", help="default: asynchronous"
    )
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together (default: 8)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, each on both engines (default: 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")
    arguments = parser.parse_args()

    from dsde.bench.contender import contenders
    from dsde.bench.engines import Engine, engine_config
    from dsde.bench.workload import MIX, questions
    from dsde.config import DsdeConfig
    from dsde.engine.plugin import engine_environment, model_paths
    from tests.asynchronous import asynchronous_scheduling

    config = DsdeConfig.model_validate({"model": {"pair": arguments.pair}})
    for name, value in engine_environment(config).items():
        os.environ.setdefault(name, value)
    config = engine_config(config, *model_paths(config), arguments.batch, arguments.batch * TOKENS)
    is_asynchronous = arguments.scheduling == "asynchronous"
    with asynchronous_scheduling() if is_asynchronous else nullcontext({}) as scheduling:
        engines = {"off": Engine(config, further=scheduling), "plain": Engine(config, plain=True)}
    for engine, contender in zip(reversed(engines.values()), contenders(["static-0"]), strict=True):
        engine.choose(contender)
    prompts = engines["plain"].encode(questions(MIX, 0, arguments.batch))

    def step_ms(name: str) -> float:
        return engines[name].run(prompts, [arguments.batch], TOKENS, 0.0).seconds * 1e3 / TOKENS

    steps: dict[str, list[float]] = {name: [] for name in engines if step_ms(name)}
    for number in range(arguments.rounds):
        # The order turns, so that a machine that slows down or speeds up favours neither.
        for name in sorted(engines, reverse=number % 2 == 0):
            steps[name].append(step_ms(name))
        print(f"\rround {number + 1} of {arguments.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for engine in engines.values():
        engine.shutdown()

    ratios = [off / plain for off, plain in zip(steps["off"], steps["plain"], strict=True)]
    result: dict[str, Any] = {
        **{name: getattr(arguments, name) for name in ("pair", "scheduling", "batch", "rounds")},
        "off_ms": statistics.median(steps["off"]),
        "plain_ms": statistics.median(steps["plain"]),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{arguments.rounds} rounds, batch {arguments.batch}, {arguments.scheduling} scheduling: a step takes "
            f"{result['off_ms']:.1f} ms at K = 0 and {result['plain_ms']:.1f} ms without a drafter, "
            f"ratio {result['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
