"""One `dsde replay` from start to end: replays, tables, files."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from dsde.bench.cell import Scene
from dsde.bench.progress import Progress, duration
from dsde.bench.replay_options import ReplayOptions, only
from dsde.bench.replay_signals import Foresight, foresee
from dsde.bench.replay_table import ablation_table, correlation_table, foresight_table, replay_summary, replay_table
from dsde.bench.replays import Replayed, Replays
from dsde.bench.report import write
from dsde.bench.workload import MIX

__all__ = ["run"]


def run(chosen: ReplayOptions) -> int:
    """Replay and report; the exit code: 0, or 130 after Ctrl-C, when what was replayed until then is reported."""
    started = time.monotonic()
    code = 0
    found: list[Foresight] = []
    with Progress() as progress:
        replays = Replays(chosen, progress)
        try:
            if chosen.signal_length is None:
                replays.run()
            else:
                _foresee(chosen, chosen.signal_length, progress, found)
        except KeyboardInterrupt:
            code = 130
    console = Console()
    if not console.is_terminal:
        console = Console(width=220)
    if replays.results:
        _tell(console, chosen, replays.results, time.monotonic() - started)
    if found:
        _tell_signals(console, found)
    if chosen.json is not None:
        write(
            chosen.json,
            {
                "cells": [one.to_dict() for one in replays.results],
                "signals": [one.to_dict() for one in found],
                "replay": _settings(chosen),
            },
        )
    if chosen.plot is not None and (replays.results or found):
        from dsde.bench.replay_plot import draw

        draw(chosen.plot, replays.results, found)
    return code


def _foresee(chosen: ReplayOptions, length: int, progress: Progress, found: list[Foresight]) -> None:
    started = time.monotonic()
    temperatures = list(dict.fromkeys(scene.temperature for scene in chosen.scenes))
    total = len(chosen.traces) * len(temperatures)
    for name, trace in chosen.traces.items():
        for temperature in temperatures:
            requests = only(trace, Scene((1,), temperature, MIX))
            found.append(foresee(name, requests, temperature, length, chosen.seed))
            left = (time.monotonic() - started) / len(found) * (total - len(found))
            progress.ran(
                f"{name}, T={temperature:g}: signals", f"{found[-1].slots} held-out slots", len(found), total, left
            )


def _settings(chosen: ReplayOptions) -> dict[str, Any]:
    """What the figures depend on, besides the traces."""
    return {
        "costs_ms": {
            name: {
                "base": one.base,
                "token": one.token,
                "draft": one.draft,
                "draft_request": one.draft_request,
                "sync": one.sync,
                "noise": one.noise,
            }
            for name, one in chosen.costs.items()
        },
        "steps": chosen.work.steps,
        "tokens": chosen.work.tokens,
        "warmup": chosen.warmup,
        "held_out": chosen.held_out,
        "trims": chosen.trims,
        "seed": chosen.seed,
    }


def _tell(console: Console, chosen: ReplayOptions, results: list[Replayed], seconds: float) -> None:
    for cost in chosen.costs:
        for trace, temperature in dict.fromkeys((one.trace, one.scene.temperature) for one in results):
            if any((one.trace, one.cost, one.scene.temperature) == (trace, cost, temperature) for one in results):
                console.print(replay_table(results, trace, cost, temperature))
    console.print(replay_summary(results))
    start = f"after {chosen.warmup} steps of warm-up" if chosen.warmup else "from a cold start"
    if chosen.held_out:
        start = "on one half of the requests, by controllers that have served the other half"
    console.print(
        f"A replay {start}; every policy of a cell decodes equally many tokens. x none: against plain decoding. "
        "x best, x best K: against the best fixed length (*), picked in hindsight. oracle, x oracle: against one that "
        "knows which slots will be accepted; x chances: against one that knows how likely each is to be, the same when "
        f"greedy. off: share of steps after which nobody drafts. {duration(seconds)}.",
        highlight=False,
    )


def _tell_signals(console: Console, found: list[Foresight]) -> None:
    console.print(correlation_table(found))
    console.print(foresight_table(found))
    console.print(ablation_table(found))
    console.print(
        f"Drafts of {found[0].length} tokens at every step. Confidence and entropy are the drafter's: of the first "
        "slot in the first table, of the slot itself in the second. KLD, WVIR and the acceptance average are those "
        "after the step before. AUC: the chance that an accepted slot scores above a rejected one, of slots up to and "
        "with the first rejection; entropy, KLD and WVIR count negated. controller: what it predicts of the slot "
        "before that is verified, after it has learnt from the other half of the requests. ECE: expected calibration "
        "error over ten bins of equal count, against acceptance when greedy, else against the overlap of p and q. The "
        "last table: logistic models of the same signals, fitted to one half of the requests and scored on the other, "
        "over the slots for which all of them are known.",
        highlight=False,
    )
