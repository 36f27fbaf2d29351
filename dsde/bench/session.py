"""One `dsde bench` from start to end: engines up, rounds, tables, files."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from dsde.bench.cell import Result
from dsde.bench.contender import LONGEST
from dsde.bench.engines import Engine, check_memory, engine_config, environment
from dsde.bench.options import DRAFTS, Options
from dsde.bench.progress import Progress, duration
from dsde.bench.record import Recorder
from dsde.bench.report import machine, write_json
from dsde.bench.rounds import Rounds, Watch
from dsde.bench.table import cells_table, signals_table, summary_table
from dsde.bench.trail import Trails
from dsde.config import DsdeConfig

__all__ = ["enter", "run"]

# What ending the engines, the tables and the pictures take.
CLOSING_S = 20.0
SIGNAL_LENGTH = 4
"""Fixed length of the runs in which signals are held against acceptance, in draft tokens."""


def enter(config: DsdeConfig, arguments: Sequence[str]) -> None:
    """Go on in the environment the engines need; threads and OpenMP are read once, when a process starts.

    arguments: the command line to start again with, where the environment is not that one yet.
    """
    wanted = environment(config)
    # A user's own number of threads stands.
    wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", wanted.get("OMP_NUM_THREADS", "1"))
    preload, ours = os.environ.get("LD_PRELOAD", ""), wanted.get("LD_PRELOAD", "")
    if ours:
        wanted["LD_PRELOAD"] = preload if ours in preload else ":".join(filter(None, (ours, preload)))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", "dsde.cli", *arguments], {**os.environ, **wanted})


def run(chosen: Options, config: DsdeConfig) -> int:
    """Measure and report; the exit code: 0, or 130 after Ctrl-C.

    What was measured until then is reported also after Ctrl-C, and after a failure before it goes on its way.
    """
    started = time.monotonic()
    models = _models(chosen)
    plan = chosen.plan
    batch = max(max(scene.load) for scene in plan.scenes)
    written = plan.tokens * max(sum(scene.load) for scene in plan.scenes)
    configs = {draft: engine_config(config, *pair, batch, written) for draft, pair in models.items()}
    check_memory(configs)

    trails = Trails() if chosen.plot is not None else None
    recorder = Recorder(LONGEST) if chosen.record is not None else None
    observers: dict[int, Watch] = {}
    if trails is not None:
        observers[SIGNAL_LENGTH] = trails.observe
    if recorder is not None:
        observers[LONGEST] = recorder.observe
    engines: list[Engine] = []
    failure: BaseException | None = None
    rounds: Rounds | None = None
    with Progress() as progress:
        try:
            progress.stage("loading the target alone")
            engines.append(Engine(next(iter(configs.values())), plain=True))
            for draft, own in configs.items():
                progress.stage(f"loading the target with the {draft} draft")
                engines.append(Engine(own))
            left = plan.seconds - (time.monotonic() - started) - CLOSING_S
            timed = replace(plan, seconds=max(1.0, left))
            drafted = dict(zip(configs, engines[1:], strict=True))
            rounds = Rounds(
                timed, engines[0], drafted, progress, trails.watch if trails is not None else None, observers
            )
            progress.stage("reading the prompts")
            rounds.measure()
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        finally:
            for engine in engines:
                engine.shutdown()
    if rounds is not None and rounds.results:
        where = machine(config.serving.device, models)
        _tell(rounds, trails, where["processor"], time.monotonic() - started)
        _write(chosen, rounds, trails, recorder, where)
    if failure is not None and not isinstance(failure, KeyboardInterrupt):
        raise failure
    return 0 if failure is None else 130


def _write(
    chosen: Options, rounds: Rounds, trails: Trails | None, recorder: Recorder | None, where: Mapping[str, Any]
) -> None:
    if chosen.json is not None:
        write_json(chosen.json, rounds.results, where)
    if chosen.plot is not None and trails is not None:
        from dsde.bench.plot import draw

        draw(chosen.plot, rounds.results, trails)
    if chosen.record is not None and recorder is not None:
        count = recorder.write(chosen.record, {"draft": next(iter(chosen.models)), "machine": where})
        print(f"{chosen.record}: {count} requests")


def _models(chosen: Options) -> dict[str, tuple[str, str]]:
    from dsde.models.check import check_models
    from dsde.models.pairs import pair

    found: dict[str, tuple[str, str]] = {}
    for quality, own in chosen.models.items():
        if own is None:
            prepared = pair(DRAFTS[quality])
            own = (str(prepared.target), str(prepared.draft))
        check_models(*own)
        found[quality] = own
    return found


def _tell(rounds: Rounds, trails: Trails | None, processor: str, seconds: float) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    results: list[Result] = rounds.results
    for draft in dict.fromkeys(one.cell.draft for one in results):
        for temperature in dict.fromkeys(one.cell.scene.temperature for one in results):
            console.print(cells_table(results, rounds.best, draft, temperature))
    console.print(summary_table(results))
    if rounds.unfinished:
        console.print("Time was up before every cell had a whole round: give more --minutes, or measure less.")
    if trails is not None and trails.observed():
        console.print(signals_table(trails))
    fewest, most = min(one.rounds for one in results), max(one.rounds for one in results)
    count = f"{most} round{'s' if most > 1 else ''}" if fewest == most else f"{fewest} to {most} rounds"
    lesson = "A policy that learns had one run of each cell before it counted. " if rounds.lessons else ""
    console.print(
        "tokens/s: decoding alone, with a full batch; prompts are read before the clock starts. x none: against an "
        "engine without a drafter. x best K: against the best fixed length (*), picked in hindsight. Ratios are "
        f"geometric means over rounds ({count}). {lesson}tokens/step: of a verification with drafts. wasted: share of "
        f"the computed drafts that were not accepted. {processor}, {duration(seconds)}.",
        highlight=False,
    )
