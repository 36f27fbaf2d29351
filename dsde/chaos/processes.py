"""The processes of an application that `dsde serve` runs on this machine, and what can be done to them."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import psutil

__all__ = ["Application"]

_ENGINE = "EngineCore"
_INGRESS = "OpenAIIngress"
_REPLICA = "EngineReplica"
# In the name that Ray gives a replica's process while its constructor runs.
_STARTING = "initialize"


class Application:
    """The processes below `dsde serve`. pid: its own; None finds it.

    Raises ValueError naming --pid where there is no such process, or more than one and no choice between them.
    """

    def __init__(self, pid: int | None = None) -> None:
        if pid is None:
            found = [one.pid for one in psutil.process_iter() if _is_serve(one)]
            if len(found) != 1:
                what = "no `dsde serve` runs here" if not found else f"{len(found)} run here: {sorted(found)}"
                raise ValueError(f"--pid: {what}; accepted: the process id of one")
            pid = found[0]
        if not psutil.pid_exists(pid) or not _is_serve(psutil.Process(pid)):
            raise ValueError(f"--pid {pid}: that is no `dsde serve`; accepted: the process id of one")
        self.pid = pid

    @property
    def is_running(self) -> bool:
        """Whether it still serves."""
        return psutil.pid_exists(self.pid)

    def engines(self) -> list[int]:
        """Process ids of the engines that serve: not of those that start, were stopped, or have lost their replica."""
        return [one.pid for one in self._named(_ENGINE) if one.status() != psutil.STATUS_STOPPED and _has_replica(one)]

    def candidates(self, kind: str) -> list[int]:
        """Process ids that a fault of this kind can hit."""
        if kind == "ingress":
            return [one.pid for one in self._named(_INGRESS)]
        if kind == "replica":
            return [parent.pid for pid in self.engines() if (parent := psutil.Process(pid).parent()) is not None]
        return self.engines()

    def hit(self, kind: str, pid: int) -> None:
        """Do it."""
        process = psutil.Process(pid)
        if kind == "stall":
            process.suspend()
        else:
            process.kill()

    def memory(self) -> dict[int, int]:
        """Bytes of each of its processes, by process id; what several share counts in parts (PSS)."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for one in (psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)):
                with suppress(psutil.Error):
                    found[one.pid] = int(one.memory_full_info().pss)
        return found

    def _named(self, name: str) -> list[psutil.Process]:
        found = []
        # Processes come and go while they are asked.
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if name in "".join(one.cmdline()) and one.status() != psutil.STATUS_ZOMBIE:
                        found.append(one)
        return found


def _has_replica(engine: psutil.Process) -> bool:
    with suppress(psutil.Error):
        parent = engine.parent()
        name = "" if parent is None else "".join(parent.cmdline())
        return _REPLICA in name and _STARTING not in name
    return False


def _is_serve(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(
        name.rpartition("/")[2] in ("dsde", "dsde.cli") and command == "serve" for name, command in pairwise(words)
    )
