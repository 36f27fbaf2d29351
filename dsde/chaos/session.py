"""One run of `dsde chaos`: faults as planned, a line for each and for each recovery, report and verdict at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

from dsde.chaos.plan import KINDS, Planned, plan
from dsde.chaos.processes import Application
from dsde.chaos.traffic import Traffic

__all__ = ["Fault", "check", "run"]

_POLL_S = 0.5
_RECOVERY_S = 240.0
GROWTH, SLACK_MIB = 1.2, 200
"""What the memory of processes that outlive all faults may grow by."""
# Engines that a fault of each kind takes away.
_COSTS = {"engine": 1, "replica": 1, "stall": 1, "ingress": 0}


@dataclass(slots=True)
class Fault:
    """What became of a planned fault.

    at_s: seconds after the start. pid: the process that was hit, None where the fault was left out. left: engines that
    ran afterwards. recovered_s: seconds until as many engine processes ran as at the start; None: not yet.
    """

    at_s: float
    kind: str
    pid: int | None
    left: int
    recovered_s: float | None = None


def check(kinds: Sequence[str], every_s: float, minutes: float) -> None:
    """Raise ValueError for options that cannot be."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"--faults {kind}: accepted: {', '.join(KINDS)}")
    if not every_s > 0 or not minutes > 0:
        raise ValueError(f"--every {every_s:g} --minutes {minutes:g}: accepted: numbers above 0")


def run(
    pid: int | None,
    *,
    every_s: float,
    minutes: float,
    seed: int,
    kinds: Sequence[str],
    keep: int,
    json_file: Path | None,
    traffic: Traffic | None = None,
) -> int:
    """Inject faults until the time is over and the application is whole again; the exit status.

    keep: engines that a fault must leave running; one that would not waits, and is left out where the time ends first.
    traffic: streams to send meanwhile; the last line printed is then their Verdict as JSON. 1 where the application
    ended, is not whole within four minutes of the last fault, its memory has grown, or the verdict does not hold.
    """
    application = Application(pid)
    seconds = minutes * 60.0
    session = _Session(application, keep, seconds, time.monotonic)
    try:
        with traffic or nullcontext():
            whole = session.run(plan(seed, kinds, every_s, seconds))
    finally:
        if json_file is not None:
            faults = [asdict(one) for one in session.faults]
            report = {"seed": seed, "every_s": every_s, "faults": faults, "memory_mib": session.memory_mib}
            json_file.write_text(json.dumps(report, indent=1) + "\n")
    done = sum(one.pid is not None for one in session.faults)
    print(f"{done} faults, {len(session.faults) - done} left out; {'whole again' if whole else 'NOT whole'}")
    flat = session.memory_mib[-1] <= GROWTH * session.memory_mib[0] + SLACK_MIB
    print(
        f"memory of the processes that outlived all faults: {session.memory_mib[0]} MiB before the first, "
        f"{session.memory_mib[-1]} MiB at the end{'' if flat else ': NOT flat'}"
    )
    if traffic is None:
        return 0 if whole and flat else 1
    for line in traffic.complaints:
        print(line)
    traffic.verdict.faults = done
    print(json.dumps(traffic.verdict.to_dict()), flush=True)
    return 0 if whole and flat and traffic.verdict.holds else 1


class _Session:
    def __init__(self, application: Application, keep: int, seconds: float, clock: Callable[[], float]) -> None:
        self.faults: list[Fault] = []
        self._application = application
        self._keep, self._seconds = keep, seconds
        self._clock = clock
        self._start = clock()
        self._engines = len(application.engines())
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}

    @property
    def memory_mib(self) -> tuple[int, int]:
        """(before the first fault, at the end), of the processes that were there both times."""
        lasting = self._before.keys() & self._after.keys()
        before, after = (sum(at[pid] for pid in lasting) >> 20 for at in (self._before, self._after))
        return before, after

    def run(self, planned: Sequence[Planned]) -> bool:
        self._start = self._clock()
        self._say(f"{self._engines} engines below pid {self._application.pid}; {len(planned)} faults to come")
        try:
            return self._run(planned)
        finally:
            self._after = self._application.memory()

    def _run(self, planned: Sequence[Planned]) -> bool:
        for number, one in enumerate(planned):
            if not self._watch(one.at_s):
                return False
            if number == 0:
                # By now traffic has warmed it up.
                self._before = self._application.memory()
            if not self._watch(self._seconds, partial(self._bears, one.kind)):
                return False
            self._inject(one)
        return self._watch(self._now() + _RECOVERY_S, lambda: not self._open) and not self._open

    @property
    def _open(self) -> list[Fault]:
        """Faults that the application has not recovered from."""
        return [one for one in self.faults if one.pid is not None and one.recovered_s is None]

    def _bears(self, kind: str) -> bool:
        """Whether a fault of this kind leaves enough engines."""
        left = len(self._application.engines()) - _COSTS[kind]
        return left >= self._keep and bool(self._application.candidates(kind))

    def _inject(self, planned: Planned) -> None:
        engines, costs = len(self._application.engines()), _COSTS[planned.kind]
        candidates = self._application.candidates(planned.kind)
        if not candidates or engines - costs < self._keep:
            self.faults.append(Fault(self._now(), planned.kind, None, engines))
            self._say(f"{planned.kind}: left out, {engines} of {self._engines} engines run")
            return
        victim = planned.victim(candidates)
        try:
            self._application.hit(planned.kind, victim)
        except psutil.NoSuchProcess:
            self._say(f"{planned.kind}: pid {victim} had gone")
            return
        self.faults.append(Fault(self._now(), planned.kind, victim, engines - costs))
        self._say(f"{planned.kind}: pid {victim}, {engines - costs} of {self._engines} engines left")

    def _watch(self, until_s: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Note recoveries until then, or until `enough`; False where the application has ended."""
        while True:
            if not self._application.is_running:
                self._say("the application has ended")
                return False
            open_faults = self._open
            if open_faults and self._is_whole(open_faults):
                for one in open_faults:
                    one.recovered_s = self._now() - one.at_s
                self._say(f"{self._engines} engines again after {open_faults[0].recovered_s:.1f} s")
            if self._now() >= until_s or enough():
                return True
            time.sleep(_POLL_S)

    def _is_whole(self, open_faults: Sequence[Fault]) -> bool:
        gone = not any(psutil.pid_exists(one.pid) for one in open_faults if one.pid is not None)
        return (
            gone and len(self._application.engines()) >= self._engines and bool(self._application.candidates("ingress"))
        )

    def _now(self) -> float:
        return self._clock() - self._start

    def _say(self, text: str) -> None:
        print(f"[{self._now():7.1f} s] {text}", flush=True)
