"""Work for a caller that dies is cancelled; all other work goes on."""

from __future__ import annotations

import asyncio

import pytest

from deployments.callers import Callers


class Actors:
    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.asked: list[str] = []

    def is_dead(self, name: str) -> bool:
        self.asked.append(name)
        return name in self.dead


async def work(callers: Callers, caller: str, done: asyncio.Event) -> str:
    with callers.waits(caller):
        await done.wait()
    return caller


async def until(actors: Actors, number: int) -> None:
    for _ in range(5000):
        if len(actors.asked) >= number:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"asked {len(actors.asked)} times, not {number}")


async def test_only_what_the_dead_wait_for_is_cancelled() -> None:
    actors, done = Actors(), asyncio.Event()
    callers = Callers(actors.is_dead, 0.001)
    work_of = {name: asyncio.create_task(work(callers, name, done)) for name in ("a", "b", "")}
    await until(actors, 4)
    actors.dead.add("a")
    with pytest.raises(asyncio.CancelledError):
        await work_of["a"]
    await until(actors, len(actors.asked) + 4)
    done.set()
    assert await work_of["b"] == "b"
    assert await work_of[""] == ""
    assert set(actors.asked) == {"a", "b"}


async def test_nobody_is_asked_after_that_waits_for_nothing() -> None:
    actors, done = Actors(), asyncio.Event()
    callers = Callers(actors.is_dead, 0.001)
    done.set()
    assert await work(callers, "a", done) == "a"
    await asyncio.sleep(0.02)
    assert len(actors.asked) <= 1
    assert len(asyncio.all_tasks()) == 1
    # Whoever comes back is watched again.
    actors.dead.add("a")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work(callers, "a", asyncio.Event()))
