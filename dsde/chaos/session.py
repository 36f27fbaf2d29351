"""One run of `dsde chaos`: faults as planned, a line for each and for each recovery, a report at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dsde.chaos.plan import KINDS, Planned, plan
from dsde.chaos.processes import Application

__all__ = ["Fault", "run"]

_POLL_S = 0.5
_RECOVERY_S = 240.0


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


def run(
    pid: int | None,
    *,
    every_s: float,
    minutes: float,
    seed: int,
    kinds: Sequence[str],
    keep: int,
    json_file: Path | None,
) -> int:
    """Inject faults until the time is over and the application is whole again; the exit status.

    keep: engines that a fault must leave running; one that cannot is left out. 1 where the application ended, or is
    not whole within four minutes of the last fault. ValueError for options that cannot be.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"--faults {kind}: accepted: {', '.join(KINDS)}")
    if not every_s > 0 or not minutes > 0:
        raise ValueError(f"--every {every_s:g} --minutes {minutes:g}: accepted: numbers above 0")
    application = Application(pid)
    session = _Session(application, keep, time.monotonic)
    try:
        whole = session.run(plan(seed, kinds, every_s, minutes * 60.0))
    finally:
        if json_file is not None:
            report = {"seed": seed, "every_s": every_s, "faults": [asdict(one) for one in session.faults]}
            json_file.write_text(json.dumps(report, indent=1) + "\n")
    done = sum(one.pid is not None for one in session.faults)
    print(f"{done} faults, {len(session.faults) - done} left out; {'whole again' if whole else 'NOT whole'}")
    return 0 if whole else 1


class _Session:
    def __init__(self, application: Application, keep: int, clock: Callable[[], float]) -> None:
        self.faults: list[Fault] = []
        self._application = application
        self._keep = keep
        self._clock = clock
        self._start = clock()
        self._engines = len(application.engines())

    def run(self, planned: Sequence[Planned]) -> bool:
        self._say(f"{self._engines} engines below pid {self._application.pid}; {len(planned)} faults to come")
        for one in planned:
            if not self._watch(one.at_s):
                return False
            self._inject(one)
        return self._watch(self._now() + _RECOVERY_S, whole=True)

    def _inject(self, planned: Planned) -> None:
        engines = len(self._application.engines())
        candidates = self._application.candidates(planned.kind)
        costs = 0 if planned.kind == "ingress" else 1
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

    def _watch(self, until_s: float, *, whole: bool = False) -> bool:
        """Note recoveries until then, or until nothing is left to recover where `whole`; False where it never is."""
        while self._now() < until_s:
            if not self._application.is_running:
                self._say("the application has ended")
                return False
            open_faults = [one for one in self.faults if one.pid is not None and one.recovered_s is None]
            if open_faults and self._is_whole(open_faults):
                for one in open_faults:
                    one.recovered_s = self._now() - one.at_s
                self._say(f"{self._engines} engines again after {open_faults[0].recovered_s:.1f} s")
                continue
            if whole and not open_faults:
                return True
            time.sleep(_POLL_S)
        return not whole

    def _is_whole(self, open_faults: Sequence[Fault]) -> bool:
        gone = not any(psutil.pid_exists(one.pid) for one in open_faults if one.pid is not None)
        return (
            gone and len(self._application.engines()) >= self._engines and bool(self._application.candidates("ingress"))
        )

    def _now(self) -> float:
        return self._clock() - self._start

    def _say(self, text: str) -> None:
        print(f"[{self._now():7.1f} s] {text}", flush=True)
