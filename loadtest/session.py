"""One `dsde loadtest` from start to end: requests planned, sent and reported, or a rate found."""

from __future__ import annotations

import asyncio
import datetime
import resource
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dsde.bench.progress import Progress, duration
from loadtest.aiperf import command, write_dataset
from loadtest.drive import Drive
from loadtest.exchange import Failure, Request, Sender
from loadtest.figures import ALL, LATE_MS, Slo, Summary, complaints, summaries
from loadtest.http import HttpSender
from loadtest.options import Options
from loadtest.plan import GRPC, HTTP, plan
from loadtest.profile import MOST_REQUESTS, Profile, arrivals
from loadtest.rate import Found, Probe, bounds, find_rate, judge
from loadtest.records import RECORDS, Record, read_records
from loadtest.report import write_comparison, write_report
from loadtest.rpc import GrpcSender
from loadtest.table import compared, note, table, views
from loadtest.workload import draw

__all__ = ["compare", "console", "planned", "run"]

_SILENCE_S = 5.0
_WIDTH = 200


class _Watch:
    """Says how far a run is, every few seconds. duration_s: until the last request leaves."""

    def __init__(self, progress: Progress, total: int, duration_s: float) -> None:
        self._progress = progress
        self._total = total
        self._duration_s = duration_s
        self._start = self._said = time.monotonic()
        self._done = self._failed = 0

    def __call__(self, record: Record, under_way: int) -> None:
        self._done += 1
        self._failed += record.error is not None
        now = time.monotonic()
        if self._done == self._total or now - self._said >= _SILENCE_S:
            self._said = now
            left = max(0.0, self._duration_s - (now - self._start))
            figure = f"{under_way} under way, {self._failed} failed"
            self._progress.ran("requests", figure, self._done, self._total, left)


def run(chosen: Options) -> int:
    """Do what was chosen; the exit code: 0, 1 where a request failed, a figure is missing or no rate holds, 130 after
    Ctrl-C. What was measured until then is reported also after Ctrl-C.
    """
    _raise_file_limit()
    try:
        if chosen.aiperf is not None:
            return asyncio.run(_aiperf(chosen, chosen.aiperf))
        if chosen.find_rate:
            return asyncio.run(_find_rate(chosen))
        return _run(chosen)
    except Failure as failure:
        return _loud([str(failure)])


def _run(chosen: Options) -> int:
    requests = planned(chosen)
    kept: list[Record] = []
    about = {**chosen.about, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    interrupted = False
    with Progress() as progress:
        try:
            asyncio.run(_drive(chosen, requests, progress, kept, about))
        except KeyboardInterrupt:
            interrupted = True
    if kept:
        found = summaries(kept, chosen.slo)
        tell(found, chosen.slo)
        if chosen.report is not None:
            print(write_report(chosen.report, kept, chosen.slo, about))
    if interrupted:
        return 130
    return _loud(complaints(kept))


async def _drive(
    chosen: Options, requests: Sequence[Request], progress: Progress, kept: list[Record], about: dict[str, Any]
) -> None:
    senders, about["model"] = await _senders(chosen)
    last_s = max(one.at_s for one in requests)
    progress.stage(f"sending {len(requests)} requests in {duration(last_s)}")
    drive = Drive(senders, chosen.timeout_s, on_record=_Watch(progress, len(requests), last_s))
    try:
        await drive.run(requests)
    finally:
        kept += sorted(drive.records, key=lambda one: one.scheduled_s)
        await _close(senders)


def planned(chosen: Options, profile: Profile | None = None, seed: int | None = None) -> list[Request]:
    """The requests of a run; of another profile or seed than the chosen one, where given. Raises ValueError if none."""
    profile = profile or chosen.profile
    seed = chosen.manner.seed if seed is None else seed
    if profile is None:
        prompts = iter(own := [one for one in chosen.prompts if (one.at_s or 0.0) < chosen.duration_s])
        times = [one.at_s or 0.0 for one in own]
        if len(own) > MOST_REQUESTS:
            raise ValueError(f"--duration {chosen.duration_s:g}: {len(own)} requests; accepted: up to {MOST_REQUESTS}")
    else:
        prompts = draw(chosen.prompts, chosen.weights, seed)
        times = arrivals(profile, seed)
    if not times:
        raise ValueError(f"--duration {chosen.duration_s:g}: no request would be sent in it; raise it, or --rate")
    return plan(prompts, times, chosen.protocols, chosen.manner, f"load-{uuid.uuid4().hex[:8]}")


async def _senders(chosen: Options) -> tuple[dict[str, Sender], str]:
    """(a way for each protocol, all of which answer; the model's name). Raises Failure."""
    senders: dict[str, Sender] = {}
    model = ""
    try:
        for protocol in chosen.protocols:
            if protocol == HTTP:
                senders[HTTP] = HttpSender(chosen.url, chosen.api_key)
            else:
                senders[GRPC] = GrpcSender(chosen.address, chosen.api_key)
            model, _ = await senders[protocol].model()
    except BaseException:
        await _close(senders)
        raise
    return senders, model


async def _close(senders: dict[str, Sender]) -> None:
    for sender in senders.values():
        await sender.close()


async def _find_rate(chosen: Options) -> int:
    assert chosen.profile is not None
    deadline = time.monotonic() + 60 * chosen.minutes
    senders, _ = await _senders(chosen)
    slo_s = chosen.slo.ttft_ms / 1000
    taken = 0
    with Progress() as progress:

        async def probe(rate: float) -> Probe:
            nonlocal taken
            taken += 1
            profile = Profile("steady", rate, rate, chosen.duration_s)
            requests = planned(chosen, profile, chosen.manner.seed + taken)
            drive = Drive(senders, chosen.timeout_s)
            # Who has no first token by then has missed it, so an overloaded server does not hold the search up.
            await drive.run(requests, patience_s=slo_s)
            made = judge(rate, drive.records, chosen.slo.ttft_ms)
            verdict = "holds" if made.holds else "fails"
            waits = f"p95 TTFT {made.p95_ttft_ms:.0f} ms, {made.failed} failed: {verdict}"
            progress.stage(f"{rate:.3g} requests/s, {made.requests} requests: {waits}")
            return made

        def out() -> bool:
            return time.monotonic() + chosen.duration_s + slo_s > deadline

        progress.stage(f"looking for the highest rate with p95 TTFT up to {chosen.slo.ttft_ms:g} ms")
        try:
            found = await find_rate(probe, chosen.profile.rate, out, bounds(chosen.duration_s))
        finally:
            await _close(senders)
    return _say_rate(found, chosen)


def _say_rate(found: Found, chosen: Options) -> int:
    bound = f"p95 TTFT up to {chosen.slo.ttft_ms:g} ms"
    if found.rate is None:
        assert found.failing is not None
        return _loud([f"no rate holds {bound}: {found.failing:.3g} requests/s fails already"])
    failing = "none that was tried failed" if found.failing is None else f"{found.failing:.3g} fails"
    if not found.exact:
        bounded = found.failing is None and found.rate * 2 > bounds(chosen.duration_s)[1]
        failing += "; no higher one is tried" if bounded else "; the time was up, --minutes gives more"
    print(f"highest rate with {bound}: {found.rate:.3g} requests/s ({failing})")
    return 0


async def _aiperf(chosen: Options, directory: Path) -> int:
    sender = HttpSender(chosen.url, chosen.api_key)
    try:
        model, tokenizer = await sender.model()
    finally:
        await sender.close()
    requests = planned(chosen)
    file = write_dataset(directory, requests)
    print(f"{file}: {len(requests)} requests")
    print(command(file, model, tokenizer, sender.base, len(requests)))
    return 0


def compare(first: Path, second: Path, slo: Slo, report: Path | None) -> int:
    """Put two runs side by side. Raises ValueError naming a place that holds none."""
    names = _names(first, second)
    runs = dict(zip(names, (read_records(first), read_records(second)), strict=True))
    by_group = [{(one.workload, one.protocol): one for one in summaries(records, slo)} for records in runs.values()]
    pairs = [(one, by_group[1][group]) for group, one in by_group[0].items() if group in by_group[1]]
    shown = [pair for pair in pairs if ALL in (pair[0].workload, pair[0].protocol)]
    console().print(compared(names, shown[: 1 if report is not None else None]))
    if report is not None:
        print(write_comparison(report, runs, pairs, slo))
    return 0


def _names(first: Path, second: Path) -> tuple[str, str]:
    """What to call two places: the shortest ends of their paths that differ."""
    one, other = (place.resolve().parent if place.name == RECORDS else place.resolve() for place in (first, second))
    if one == other:
        raise ValueError(f"--compare {first} {second}: that is the same run twice")
    for length in range(1, 1 + max(len(one.parts), len(other.parts))):
        names = ("/".join(one.parts[-length:]), "/".join(other.parts[-length:]))
        if names[0] != names[1]:
            return names
    raise AssertionError


def console() -> Console:
    """stdout, wide enough for the tables where it is no terminal."""
    shown = Console()
    return shown if shown.is_terminal else Console(width=_WIDTH)


def tell(found: Sequence[Summary], slo: Slo) -> None:
    """Print the tables of a run; each class at each protocol is for the report."""
    out = console()
    shown = [one for one in found if ALL in (one.workload, one.protocol)]
    for title, columns in views():
        out.print(table(shown, title, columns))
    out.print(note(slo, found[0]), highlight=False)
    if found[0].late_ms > LATE_MS:
        print(
            f"dsde loadtest: requests left up to {found[0].late_ms:.0f} ms late (p99): this side could not keep the "
            "rate, so the server had less load than asked for",
            file=sys.stderr,
        )


def _loud(lines: Sequence[str]) -> int:
    """Say what went wrong; the exit code."""
    for line in lines:
        print(f"dsde loadtest: FAILED: {line}", file=sys.stderr)
    return 1 if lines else 0


def _raise_file_limit() -> None:
    """An open loop holds as many connections as the server lets it wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
