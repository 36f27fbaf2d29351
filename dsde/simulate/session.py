"""`dsde simulate`: checks its options, runs every policy on the same arrivals, and reports."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsde.control.replay import COSTS
from dsde.control.trace import RequestTrace, Trace, synthesize
from dsde.simulate.policies import POLICIES
from dsde.simulate.run import Figures, Scenario, Setting, simulate
from dsde.simulate.workload import MIXES, Group, groups

__all__ = ["run"]

BASELINE = "two_random_choices"
"""What Ray Serve does by itself."""
PER_REPLICA = 250
"""Requests for each replica by default: fewer, and the run is over before the replicas are as full as they get."""
SILENCE_S = 2.0
PACKAGED = Path(__file__).parent.parent / "traces"
MADE_UP = {"code": (0.85, 0.0), "summary": (0.75, 0.0), "chat": (0.65, 0.7), "story": (0.4, 1.0)}
"""Median acceptance of a draft token, and temperature, of classes that stand in for a recorded trace."""


@dataclass(frozen=True, slots=True)
class _Result:
    policy: str
    runs: tuple[Figures, ...]

    def mean(self, name: str) -> float:
        return sum(getattr(one, name) for one in self.runs) / len(self.runs)


def run(given: argparse.Namespace) -> int:
    """Simulate what the command line asks for. ValueError with one line: the option, its value, what is accepted."""
    policies = _policies(given.policies)
    settings = _settings(given)
    recorded, source = _recorded(given.trace)
    said = time.monotonic()
    runs: dict[str, list[Figures]] = {policy: [] for policy in policies}
    for setting in settings:
        scenario = Scenario(setting, recorded)
        for policy in policies:
            runs[policy].append(simulate(policy, scenario))
            if time.monotonic() - said > SILENCE_S:
                print(f"seed {setting.seed}: {policy} done", flush=True)
                said = time.monotonic()
    results = [_Result(policy, tuple(figures)) for policy, figures in runs.items()]
    Console().print(_table(results, settings, given.machine))
    simulated = {
        **{name: value for name, value in asdict(settings[0]).items() if name != "seed"},
        "seeds": [setting.seed for setting in settings],
        "machine": given.machine,
        "trace": source,
        "classes": [group.name for group in recorded],
    }
    if given.json is not None:
        given.json.write_text(json.dumps({"policies": _figures(results), "simulated": simulated}, indent=1) + "\n")
    if given.plot is not None:
        _draw(given.plot, results, f"{settings[0].mix}, {settings[0].replicas} replicas, load {settings[0].load:g}")
    return 0


def _settings(given: argparse.Namespace) -> list[Setting]:
    if given.mix not in MIXES:
        raise ValueError(f"--mix {given.mix}: accepted: {', '.join(MIXES)}")
    if given.machine not in COSTS:
        raise ValueError(f"--machine {given.machine}: accepted: {', '.join(COSTS)}")
    replicas = _count("--replicas", given.replicas, 1, 256)
    requests = _count("--requests", given.requests or str(max(100, PER_REPLICA * replicas)), 100, 100_000)
    seed = _count("--seed", given.seed, 0, 2**31)
    runs = _count("--runs", given.runs, 1, 100)
    try:
        load = float(given.load)
    except ValueError:
        load = math.nan
    if not 0.0 < load <= 2.0:
        raise ValueError(f"--load {given.load}: accepted: a number above 0 and at most 2; 1 = all replicas always full")
    first = Setting(replicas, load, given.mix, requests, seed, COSTS[given.machine])
    return [replace(first, seed=seed + number) for number in range(runs)]


def _count(option: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ValueError(f"{option} {text}: accepted: a whole number from {least} to {most}")
    return value


def _policies(text: str) -> list[str]:
    if text == "all":
        return list(POLICIES)
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in POLICIES:
            raise ValueError(f"--policies {name}: accepted: {', '.join(POLICIES)}")
    if not chosen:
        raise ValueError(f"--policies is empty: accepted: all, or some of {', '.join(POLICIES)}")
    return list(dict.fromkeys(chosen))


def _recorded(files: Sequence[Path] | None) -> tuple[list[Group], list[str]]:
    """The classes of requests, and where they come from; those of several traces are pooled."""
    chosen = list(files or sorted(PACKAGED.glob("*.jsonl.gz")))
    if not chosen:
        return groups(_made_up()), ["made up"]
    requests: list[RequestTrace] = []
    length = 64
    for file in chosen:
        if not file.is_file():
            raise ValueError(f"--trace {file}: there is no such file; accepted: traces of `dsde bench --record`")
        trace = Trace.read(file)
        name = file.name.partition(".")[0]
        requests += [replace(one, workload=f"{name}/{one.workload}") for one in trace.requests]
        length = min(length, trace.length)
    return groups(Trace(length, tuple(requests))), [file.name for file in chosen]


def _made_up() -> Trace:
    requests: list[RequestTrace] = []
    for seed, (name, (acceptance, temperature)) in enumerate(MADE_UP.items()):
        made = synthesize(requests=24, rounds=48, acceptance=acceptance, temperature=temperature, seed=seed)
        requests += [replace(one, workload=name) for one in made.requests]
    return Trace(made.length, tuple(requests))


def _figures(results: Sequence[_Result]) -> dict[str, Any]:
    """By policy, as JSON: means over the runs, and the p99 of each run."""
    return {
        one.policy: {
            **{name: float(f"{one.mean(name):.5g}") for name in Figures.__dataclass_fields__},
            "p99_ms_by_seed": [float(f"{figures.p99_ms:.5g}") for figures in one.runs],
        }
        for one in results
    }


def _table(results: Sequence[_Result], settings: Sequence[Setting], machine: str) -> Table:
    first = settings[0]
    title = f"{first.mix}: {first.replicas} replicas, load {first.load:g}, {first.requests} requests, {machine}"
    if len(settings) > 1:
        title += f", mean of {len(settings)} seeds"
    table = Table(title=title, title_justify="left")
    baseline = next((one.mean("p99_ms") for one in results if one.policy == BASELINE), None)
    for name in ("policy", "p50\ns", "p99\ns", "p99\nchange", "mean\ns", "tokens\n/s", "straggler\nshare"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for one in results:
        change = "" if baseline is None else f"{100 * (one.mean('p99_ms') / baseline - 1):+.1f} %"
        p50, p99, mean = (f"{one.mean(name) / 1e3:.2f}" for name in ("p50_ms", "p99_ms", "mean_ms"))
        share = f"{100 * one.mean('straggler_share'):.1f} %"
        table.add_row(one.policy, p50, p99, change, mean, f"{one.mean('tokens_per_s'):.0f}", share)
    return table


def _draw(file: Path, results: Sequence[_Result], title: str) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 3.6), sharey=True, layout="constrained")
    names = [one.policy for one in results]
    columns = (("p50_ms", 1e-3, "p50 (s)"), ("p99_ms", 1e-3, "p99 (s)"), ("tokens_per_s", 1.0, "tokens/s"))
    for panel, (name, unit, label) in zip(panels, columns, strict=True):
        panel.barh(names, [unit * one.mean(name) for one in results])
        panel.set_xlabel(label)
        panel.grid(alpha=0.3, axis="x")
    panels[0].invert_yaxis()
    figure.suptitle(title)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
