"""The options of `dsde bench`, checked: what is measured, on which models, for how long, and where the result goes."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

from dsde.bench.cell import Scene
from dsde.bench.contender import Contender, contenders
from dsde.bench.parse import check_directory, check_file, chosen, counts, parts, positive, temperature, whole
from dsde.bench.rounds import Plan
from dsde.bench.workload import workload_names

__all__ = ["Options", "options"]

DRAFTS = {"high": "bench", "low": "bench-low"}
"""Draft quality -> prepared pair."""

# --quick fits into its time on two cores; without --minutes the rest is bounded by rounds and tokens alone.
QUICK = {"batch": "1,8,24", "temperature": "0", "workload": "mix", "rounds": 5, "tokens": 32, "minutes": 12.0}
FULL = {"batch": "1,4,8,16,32", "temperature": "0,1", "workload": "all", "rounds": 3, "tokens": 64, "minutes": None}


@dataclass(frozen=True, slots=True)
class Options:
    """plan: scenes, contenders and time. models: draft quality -> (target, draft), None for the prepared pair."""

    plan: Plan
    models: dict[str, tuple[str, str] | None]
    json: Path | None
    plot: Path | None
    record: Path | None


def options(given: argparse.Namespace) -> Options:
    """Check the command line's text. ValueError with one line: the option, its value, what is accepted."""
    defaults = QUICK if given.quick else FULL
    if given.load is not None and given.batch is not None:
        raise ValueError(f"--load {given.load} and --batch {given.batch} exclude each other: give one of them")
    text = {name: getattr(given, name) or str(defaults[name]) for name in ("temperature", "workload")}
    if given.load is not None:
        loads = [tuple(counts("--load", given.load))]
    else:
        loads = [(batch,) for batch in dict.fromkeys(counts("--batch", given.batch or str(defaults["batch"])))]
    temperatures = dict.fromkeys(temperature(part) for part in parts("--temperature", text["temperature"]))
    workloads = (
        workload_names() if text["workload"] == "all" else chosen("--workload", text["workload"], workload_names())
    )
    scenes = [Scene(*one) for one in itertools.product(loads, temperatures, workloads)]
    minutes = defaults["minutes"] if given.minutes is None else positive("--minutes", given.minutes)
    plan = Plan(
        scenes=scenes,
        contenders=_contenders(given.policies),
        rounds=whole("--rounds", given.rounds or str(defaults["rounds"]), 1, 1000),
        tokens=whole("--tokens", given.tokens or str(defaults["tokens"]), 4, 512),
        seconds=float("inf") if minutes is None else 60.0 * float(str(minutes)),
        cold=given.cold,
    )
    check_file("--json", given.json)
    check_file("--record", given.record)
    check_directory("--plot", given.plot)
    models = _models(given)
    if given.record is not None and len(models) > 1:
        raise ValueError(f"--record {given.record}: a trace is of one pair; accepted: with --draft high or --draft low")
    return Options(plan, models, given.json, given.plot, given.record)


def _models(given: argparse.Namespace) -> dict[str, tuple[str, str] | None]:
    own = {quality: getattr(given, quality) for quality in DRAFTS if getattr(given, quality) is not None}
    if given.target is None and not own:
        return dict.fromkeys(_qualities(given.draft or ",".join(DRAFTS)))
    if given.target is None or not own:
        what = f"--target {given.target}" if given.target else " ".join(f"--{k} {v}" for k, v in own.items())
        raise ValueError(f"{what} is half a pair; accepted: --target MODEL with --high MODEL, --low MODEL or both")
    chosen = _qualities(given.draft or ",".join(own))
    for quality in chosen:
        if quality not in own:
            raise ValueError(f"--draft {given.draft}: there is no --{quality} MODEL for --target {given.target}")
    return {quality: (given.target, own[quality]) for quality in chosen}


def _qualities(text: str) -> list[str]:
    names = list(dict.fromkeys(parts("--draft", text)))
    for part in names:
        if part not in DRAFTS:
            raise ValueError(f"--draft {part!r} is unknown; accepted: {', '.join(DRAFTS)}, separated by commas")
    return names


def _contenders(text: str | None) -> list[Contender]:
    return contenders(None if text is None else parts("--policies", text))
