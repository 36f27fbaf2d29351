"""What telemetry costs, as a share of throughput: rounds with and without it take turns on one in-process engine.

With it, every step is added up and booked, every request has a span with its events and vLLM's own below it, spans and
metrics leave over OTLP to a collector in another process, and a registry is told every two seconds. Without it, none of
that runs; vLLM's own statistics run in both. Ray's registry and the serialising between processes are not in it. On a
shared machine the wall clock is noisy; CPU time leaves out what other processes took.

python tests/benchmarks/telemetry_overhead.py --pair embedded --rounds 20
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# A replica's share of the machine, as `dsde serve` gives it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_COLLECTOR = """
import time
from tests.collector import collector
with collector() as running:
    print(running.endpoint, flush=True)
    while True:
        time.sleep(60)
        running.spans.clear()
"""


class Registry:
    """A registry that takes everything and keeps nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.inc = self.set = self.observe = lambda value, tags: None


class NoTally:
    """Stands in for the scheduler's tally in rounds without telemetry."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def planned(self, *_: object) -> None:
        pass

    observed = planned


class Arm:
    """One engine that answers a batch with telemetry or without."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from dsde.config import DsdeConfig
        from dsde.engine.plugin import engine_arguments, engine_environment
        from dsde.engine.stat_logger import EngineLoad
        from dsde.telemetry.setup import start

        config = DsdeConfig.model_validate(
            {
                "model": {"pair": arguments.pair, "max_model_len": 1024},
                "speculation": {"policy": arguments.policy},
                "engine": {"max_num_seqs": arguments.batch},
            }
        )
        for name, value in engine_environment(config).items():
            os.environ.setdefault(name, value)
        registry: Any = SimpleNamespace(Counter=Registry, Gauge=Registry, Histogram=Registry)
        telemetry = start(config.telemetry, arguments.pair, "benchmark", registry)
        assert telemetry is not None
        # Ray's own logger needs a Ray worker.
        telemetry.registry = False
        self.telemetry, self._arguments = telemetry, arguments
        values = engine_arguments(config)
        values["otlp_traces_endpoint"] = telemetry.traces_endpoint
        values["additional_config"]["dsde"]["telemetry"] = True
        self.engine = LLMEngine.from_engine_args(EngineArgs(**values), stat_loggers=EngineLoad(telemetry).loggers())
        self._scheduler = self.engine.engine_core.engine_core.scheduler
        self._tally = self._scheduler._tally

    def answer(self, on: bool, name: str) -> tuple[float, float]:
        """Tokens of one batch per second, and per second of this process's CPU time, exporters' threads included."""
        from vllm import SamplingParams

        from dsde.engine.finished import finished_request
        from dsde.engine.remote import GenerateCall, trace_output
        from dsde.telemetry.tracing import RequestSpan

        self._scheduler._sends_steps = on
        self._scheduler._tally = self._tally if on else NoTally()
        self.engine.output_processor.tracing_enabled = on
        calls: dict[str, GenerateCall] = {}
        spans: dict[str, RequestSpan] = {}
        sampling = SamplingParams(temperature=0, max_tokens=self._arguments.tokens, ignore_eos=True)
        start, cpu = time.perf_counter(), time.process_time()
        for number in range(self._arguments.batch):
            request_id = f"chatcmpl-{name}-{number}"
            prompt = {"prompt_token_ids": list(range(100 + number, 132 + number))}
            calls[request_id] = GenerateCall(prompt, sampling, request_id)
            headers = None
            if on:
                spans[request_id] = RequestSpan(self._arguments.pair, request_id, sampling, None)
                headers = spans[request_id].headers
            self.engine.add_request(request_id, prompt, sampling, trace_headers=headers)
        tokens = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if on:
                    trace_output(spans[output.request_id], output, True)
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
                    if on:
                        call = calls[output.request_id]
                        seconds = time.perf_counter() - start
                        self.telemetry.metrics.request(finished_request(call, output, seconds, None))
                        spans[output.request_id].end()
        return tokens / (time.perf_counter() - start), tokens / (time.process_time() - cpu)


@contextmanager
def collector() -> Iterator[str]:
    """The endpoint of a collector in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="embedded", help="prepared pair (default: embedded)")
    parser.add_argument("--policy", default="paper", help="policy (default: paper)")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together (default: 8)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer (default: 48)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds, each with and without (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")
    arguments = parser.parse_args()

    from opentelemetry import metrics

    with collector() as endpoint:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        os.environ["OTEL_METRIC_EXPORT_INTERVAL"] = "10000"
        arm = Arm(arguments)
        arm.answer(True, "warm-on")
        arm.answer(False, "warm-off")
        speeds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(arguments.rounds):
            # The order turns, so that a machine that slows down or speeds up favours neither.
            for on in (number % 2 == 0, number % 2 == 1):
                speeds[on].append(arm.answer(on, f"{number}-{on}"))
            print(f"\rround {number + 1} of {arguments.rounds}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        metrics.get_meter_provider().shutdown()
        arm.engine.engine_core.shutdown()

    result: dict[str, Any] = {
        **{name: getattr(arguments, name) for name in ("pair", "policy", "batch", "tokens", "rounds")},
        "tokens_per_s_without": statistics.median(wall for wall, _ in speeds[False]),
        "tokens_per_s_with": statistics.median(wall for wall, _ in speeds[True]),
    }
    for place, clock in enumerate(("wall", "cpu")):
        costs = [1 - on[place] / off[place] for on, off in zip(speeds[True], speeds[False], strict=True)]
        result[f"{clock}_cost_median"] = statistics.median(costs)
        result[f"{clock}_cost_mean"] = statistics.mean(costs)
        result[f"{clock}_standard_error"] = statistics.stdev(costs) / len(costs) ** 0.5
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{arguments.rounds} rounds of {arguments.batch} requests: {result['tokens_per_s_without']:.1f} tokens/s "
            f"without, {result['tokens_per_s_with']:.1f} with telemetry"
        )
        for clock, meaning in (("wall", "of throughput"), ("cpu", "more CPU time per token")):
            median, mean, error = (
                100 * result[f"{clock}_{figure}"] for figure in ("cost_median", "cost_mean", "standard_error")
            )
            print(f"  {median:5.2f} % {meaning} (median; mean {mean:.2f} ± {error:.2f} %)")


if __name__ == "__main__":
    main()
