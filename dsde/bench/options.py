"""The options of `dsde bench`, checked: what is measured, on which models, for how long, and where the result goes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsde.bench.cell import Scene
from dsde.bench.contender import Contender, contenders
from dsde.bench.rounds import Plan
from dsde.bench.workload import workload_names

__all__ = ["Options", "options"]

DRAFTS = {"high": "bench", "low": "bench-low"}
"""Draft quality -> prepared pair."""

# --quick fits into its time on two cores; without --minutes the rest is bounded by rounds and tokens alone.
QUICK = {"batch": "1,8,24", "temperature": "0", "workload": "mix", "rounds": 5, "tokens": 32, "minutes": 12.0}
FULL = {"batch": "1,4,8,16,32", "temperature": "0,1", "workload": "all", "rounds": 3, "tokens": 64, "minutes": None}
LONGEST_LOAD = 512


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
        loads = [tuple(_counts("--load", given.load))]
    else:
        loads = [(batch,) for batch in dict.fromkeys(_counts("--batch", given.batch or str(defaults["batch"])))]
    temperatures = dict.fromkeys(_temperature(part) for part in _parts("--temperature", text["temperature"]))
    workloads = workload_names() if text["workload"] == "all" else _chosen("--workload", text["workload"])
    scenes = [Scene(*one) for one in itertools.product(loads, temperatures, workloads)]
    minutes = defaults["minutes"] if given.minutes is None else _positive("--minutes", given.minutes)
    plan = Plan(
        scenes=scenes,
        contenders=_contenders(given.policies),
        rounds=_whole("--rounds", given.rounds or str(defaults["rounds"]), 1, 1000),
        tokens=_whole("--tokens", given.tokens or str(defaults["tokens"]), 4, 512),
        seconds=float("inf") if minutes is None else 60.0 * float(str(minutes)),
        cold=given.cold,
    )
    for flag, file in (("--json", given.json), ("--record", given.record)):
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise ValueError(f"{flag} {file}: accepted: a file in a directory that exists")
    if given.plot is not None and given.plot.exists() and not given.plot.is_dir():
        raise ValueError(f"--plot {given.plot} is a file; accepted: a directory, made where it does not exist")
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
    parts = list(dict.fromkeys(_parts("--draft", text)))
    for part in parts:
        if part not in DRAFTS:
            raise ValueError(f"--draft {part!r} is unknown; accepted: {', '.join(DRAFTS)}, separated by commas")
    return parts


def _contenders(text: str | None) -> list[Contender]:
    return contenders(None if text is None else _parts("--policies", text))


def _chosen(flag: str, text: str) -> Sequence[str]:
    parts = list(dict.fromkeys(_parts(flag, text)))
    for part in parts:
        if part not in workload_names():
            accepted = f"all, {', '.join(workload_names())}, separated by commas"
            raise ValueError(f"{flag} {part!r} is unknown; accepted: {accepted}")
    return parts


def _counts(flag: str, text: str) -> list[int]:
    return [_whole(flag, part, 1, LONGEST_LOAD) for part in _parts(flag, text)]


def _parts(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise ValueError(f"{flag} {text!r} has an empty entry; accepted: values separated by single commas")
    return parts


def _whole(flag: str, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise ValueError(f"{flag} {text!r} is not accepted: give a whole number from {low} to {high}")
    return int(text)


def _temperature(text: str) -> float:
    value = _number(text)
    if value is None or not 0 <= value <= 2:
        raise ValueError(f"--temperature {text!r} is not accepted: give numbers from 0 to 2, separated by commas")
    return value


def _positive(flag: str, text: str) -> float:
    value = _number(text)
    if value is None or not 0 < value < float("inf"):
        raise ValueError(f"{flag} {text!r} is not accepted: give a number above 0")
    return value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
