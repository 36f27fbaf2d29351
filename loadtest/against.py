"""Ours against a bare vLLM: both servers up at once, the same traffic at one and then at the other, round by round.

Only one of them has requests at a time, so neither takes the other's cores. Ratios are taken within a round, whose two
halves lie side by side in time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from dsde.bench.progress import Progress
from dsde.config import DsdeConfig
from loadtest.drive import Drive
from loadtest.exchange import Failure
from loadtest.figures import Slo, Summary, complaints, summarise
from loadtest.http import HttpSender
from loadtest.options import Options
from loadtest.plan import HTTP
from loadtest.records import Record
from loadtest.report import write_report
from loadtest.server import Server
from loadtest.session import console, planned

__all__ = ["FIGURES", "ours", "run", "versus", "vllm"]

DSDE = "dsde"
PLUGIN = "dsde"
"""What follows `vllm:` for a `vllm serve` with our plugin, which leaves Ray Serve as the only difference."""
WARM_UP = 2
"""Requests that each server answers before the first round."""


class Figure(NamedTuple):
    """A row of the table. goal: what ours should keep to, if anything; of the ratio, or of the difference in ms."""

    title: str
    of: Callable[[Summary], float | None]
    goal: str = ""
    holds: Callable[[Versus], bool] | None = None


class Versus(NamedTuple):
    """Ours beside the other's: the geometric mean of the rounds' ratios, the mean of their differences, and the lowest
    and the highest ratio of a round.
    """

    ratio: float
    difference: float
    lowest: float
    highest: float


FIGURES = (
    Figure("tokens/s", lambda one: one.tokens_per_s or None, "ratio >= 0.97", lambda found: found.ratio >= 0.97),
    Figure(
        "TTFT p50 ms",
        lambda one: one.ttft_ms[0] if one.ttft_ms else None,
        "difference <= 5",
        lambda found: found.difference <= 5,
    ),
    Figure("TTFT p95 ms", lambda one: one.ttft_ms[1] if one.ttft_ms else None),
    Figure(
        "inter-token p99 ms",
        lambda one: one.inter_token_ms[2] if one.inter_token_ms else None,
        "ratio <= 1.05",
        lambda found: found.ratio <= 1.05,
    ),
    Figure("per token p50 ms", lambda one: one.tpot_ms[0] if one.tpot_ms else None),
    Figure("end to end p50 ms", lambda one: one.e2e_ms[0] if one.e2e_ms else None),
)
_PLUGIN = ("scheduler_cls", "worker_cls", "additional_config", "per_request_spec_decode_metrics")


def run(chosen: Options, config: DsdeConfig) -> int:
    """Start both, measure, print the ratios; the exit code: 0, or 1 where a request failed.

    Ctrl-C ends it after the last whole round, which is reported.
    """
    try:
        return _run(chosen, config)
    except Failure as failure:
        print(f"dsde loadtest: FAILED: {failure}", file=sys.stderr)
        return 1


def _run(chosen: Options, config: DsdeConfig) -> int:
    assert chosen.against is not None
    rounds: list[dict[str, list[Record]]] = []
    with Progress() as progress, tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        place = Path(scratch)
        servers = {DSDE: ours(config, place), chosen.against: vllm(config, chosen.against, place)}
        for name, server in servers.items():
            progress.stage(f"starting {name}")
            stack.enter_context(server)
            progress.stage(f"warming {name} up")
            asyncio.run(_half(chosen, chosen.manner.seed + chosen.rounds, server.url, name, WARM_UP))
        try:
            for number in range(chosen.rounds):
                order = list(servers) if number % 2 == 0 else list(reversed(servers))
                rounds.append({})
                for name in order:
                    progress.stage(f"round {number + 1} of {chosen.rounds}: {name}")
                    seed = chosen.manner.seed + number
                    rounds[-1][name] = asyncio.run(_half(chosen, seed, servers[name].url, name))
        except KeyboardInterrupt:
            rounds = [one for one in rounds if len(one) == len(servers)]
            if not rounds:
                raise
    records = {name: _in_turn([one[name] for one in rounds]) for name in servers}
    _tell(rounds, chosen)
    if chosen.report is not None:
        for name, own in records.items():
            directory, about = chosen.report / name.replace(":", "-"), {**chosen.about, "server": name}
            print(write_report(directory, own, chosen.slo, about, bare=name != DSDE))
    faults = [(name, line) for name, own in records.items() for line in complaints(own, bare=name != DSDE)]
    for name, line in faults:
        print(f"dsde loadtest: FAILED: {name}: {line}", file=sys.stderr)
    return 1 if faults else 0


def _in_turn(rounds: Sequence[Sequence[Record]]) -> list[Record]:
    """The rounds of one server as one run: each begins where the one before ended."""
    run: list[Record] = []
    for records in rounds:
        later = max((one.end_s for one in run), default=0.0)
        for one in records:
            moved = replace(
                one,
                scheduled_s=one.scheduled_s + later,
                started_s=one.started_s + later,
                first_token_s=None if one.first_token_s is None else one.first_token_s + later,
                end_s=one.end_s + later,
            )
            run.append(moved)
    return run


def ours(config: DsdeConfig, scratch: Path) -> Server:
    """`dsde serve` with one replica, on free ports."""
    section = config.model_dump(mode="json")
    section["serving"] |= {"replicas": 1, "port": 0, "grpc_port": 0, "dashboard_port": 0}
    section["access"] = {"open": True}
    # JSON is YAML too.
    file = scratch / "dsde.yaml"
    file.write_text(json.dumps(section))
    # The file is the whole configuration already; what the environment says of it is in there.
    environment = {name: value for name, value in os.environ.items() if not (name.startswith("DSDE_") and "__" in name)}
    command = [sys.executable, "-m", "dsde.cli", "serve", "--config", str(file)]
    return Server(DSDE, command, environment, scratch / "dsde.log", announced=r"OpenAI API\s+(\S+)/v1")


def vllm(config: DsdeConfig, name: str, scratch: Path) -> Server:
    """`vllm serve` with the same engine arguments: `vllm` without draft model and plugin, `vllm:K` with vLLM's own
    fixed speculation length K instead of the plugin, `vllm:dsde` with all of them.
    """
    from dsde.engine.plugin import cli_flags, engine_arguments, engine_environment

    arguments = engine_arguments(config)
    _, _, kind = name.partition(":")
    if kind != PLUGIN:
        arguments = {key: value for key, value in arguments.items() if key not in _PLUGIN}
        speculative = arguments.pop("speculative_config")
        if kind:
            kept = {key: speculative[key] for key in ("method", "model", "draft_sample_method")}
            arguments["speculative_config"] = {**kept, "num_speculative_tokens": int(kind)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(arguments.pop("model"))]
    command += [*cli_flags(arguments), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, **engine_environment(config)}
    return Server(name, command, environment, scratch / "vllm.log", url=f"http://127.0.0.1:{port}")


async def _half(chosen: Options, seed: int, url: str, name: str, most: int | None = None) -> list[Record]:
    """The records of one round at one server; most: of its first requests only."""
    senders = {HTTP: HttpSender(url, chosen.api_key)}
    drive = Drive(senders, chosen.timeout_s, server=name)
    try:
        await drive.run(planned(chosen, seed=seed)[:most])
    finally:
        await senders[HTTP].close()
    return sorted(drive.records, key=lambda one: one.scheduled_s)


def versus(rounds: Sequence[Mapping[str, Sequence[Record]]], slo: Slo) -> dict[str, Versus | None]:
    """Title of a figure -> how ours compares; None where a round lacks it."""
    found: dict[str, Versus | None] = {}
    for figure in FIGURES:
        pairs = []
        for halves in rounds:
            mine, theirs = (figure.of(summarise(halves[name], slo)) for name in halves_in_order(halves))
            if mine and theirs:
                pairs.append((mine, theirs))
        if not pairs or len(pairs) < len(rounds):
            found[figure.title] = None
            continue
        quotients = [mine / theirs for mine, theirs in pairs]
        found[figure.title] = Versus(
            ratio=math.prod(quotients) ** (1 / len(pairs)),
            difference=sum(mine - theirs for mine, theirs in pairs) / len(pairs),
            lowest=min(quotients),
            highest=max(quotients),
        )
    return found


def halves_in_order(halves: Mapping[str, Any]) -> tuple[str, str]:
    """(ours, the other), in whichever order they ran."""
    (other,) = (name for name in halves if name != DSDE)
    return DSDE, other


def _tell(rounds: Sequence[Mapping[str, Sequence[Record]]], chosen: Options) -> None:
    names = halves_in_order(rounds[0])
    found = versus(rounds, chosen.slo)
    grid = Table(title=f"dsde against {names[1]}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for title in ("figure", *names, "difference", "ratio", "rounds", "goal"):
        grid.add_column(title, justify="left" if title in ("figure", "goal") else "right")
    for figure in FIGURES:
        halves = [[figure.of(summarise(one[name], chosen.slo)) for one in rounds] for name in names]
        both = found[figure.title]
        told = ("-", "-", "-")
        if both is not None:
            told = (f"{both.difference:+.1f}", f"{both.ratio:.3f}", f"{both.lowest:.2f} to {both.highest:.2f}")
        goal = figure.goal
        if figure.holds is not None and both is not None:
            goal += ": held" if figure.holds(both) else ": missed"
        grid.add_row(figure.title, *(_mean(one) for one in halves), *told, goal)
    console().print(grid)
    console().print(
        f"One replica each, the same {len(rounds[0][DSDE])} requests a round at both, in turn. Figures and differences "
        f"are means over {len(rounds)} rounds, ratios geometric means of ours over the other's, with lowest and "
        "highest of a round: above 1 is more speed for tokens/s, more time for the others. Below saturation tokens/s "
        "is what the rate asks for; raise --rate to compare speed. Inter-token is between messages, of which one holds "
        "all tokens of a step: compare per token where one side speculates and the other does not.",
        highlight=False,
    )


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1f}" if known else "-"
