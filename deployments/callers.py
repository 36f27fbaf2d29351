"""The replicas that wait for this one's answers; what a dead one has asked for is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Callers", "own_name"]


class Callers:
    """Who waits for which task.

    Ray lets an actor's task run on when the actor that called it has died: its request would be answered to the last
    token, for nobody. is_dead: whether the actor of a name has died; called in a thread. period_s: how often each
    caller is asked after, in seconds.
    """

    def __init__(self, is_dead: Callable[[str], bool] | None = None, period_s: float = 2.0) -> None:
        self._is_dead = is_dead or _is_dead
        self._period_s = period_s
        self._waiting: dict[str, set[asyncio.Task[Any]]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    @contextmanager
    def waits(self, caller: str) -> Iterator[None]:
        """Around a task's work for `caller`, the name of an actor; the task is cancelled if that dies meanwhile.

        Nobody watches where the name is empty.
        """
        task = asyncio.current_task()
        if not caller or task is None:
            yield
            return
        tasks = self._waiting.setdefault(caller, set())
        tasks.add(task)
        if caller not in self._watches:
            self._watches[caller] = asyncio.create_task(self._watch(caller))
        try:
            yield
        finally:
            tasks.discard(task)

    async def _watch(self, caller: str) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            if not self._waiting[caller]:
                break
            if await asyncio.to_thread(self._is_dead, caller):
                for task in self._waiting[caller]:
                    task.cancel()
                break
        # Nothing is awaited from the last look on, so none that joins is overlooked.
        del self._waiting[caller], self._watches[caller]


def own_name() -> str:
    """The name of the actor that this is, under which others find it."""
    import ray

    return str(ray.get_runtime_context().get_actor_name() or "")


def _is_dead(name: str) -> bool:
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE

    try:
        ray.get_actor(name, namespace=SERVE_NAMESPACE)
    except ValueError:
        # Ray knows no living actor of this name.
        return True
    except Exception:
        # Ray itself did not answer.
        return False
    return False
