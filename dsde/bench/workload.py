"""The prompts of a benchmark: the short ones that each class of loadtest/workloads begins with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from loadtest.workload import classes, read

__all__ = ["MIX", "Prompt", "Question", "classes", "questions", "workload_names"]

Chat = list[dict[str, Any]]


class Question(NamedTuple):
    """A chat and the class it is of."""

    workload: str
    chat: Chat


class Prompt(NamedTuple):
    """A question as the engine reads it."""

    workload: str
    token_ids: Sequence[int]


MIX = "mix"
# Short enough for the KV cache that dsde.bench.engines sizes, and always the same: measurements stay comparable.
QUESTIONS = 12
# A batch larger than a class gets the same questions with one of these, so that no two of its requests are alike.
MANNERS = ("", "Take your time and be thorough.", "Write for a curious beginner.", "Use short, plain sentences.")


def workload_names() -> tuple[str, ...]:
    """What --workload takes: the mix of all classes, and each class."""
    return (MIX, *classes())


@cache
def _read(name: str) -> tuple[Question, ...]:
    if name == MIX:
        return tuple(chain.from_iterable(zip(*(_read(one) for one in classes()), strict=True)))
    return tuple(Question(name, [dict(one) for one in prompt.messages]) for prompt in read(name)[:QUESTIONS])


def questions(name: str, start: int, count: int) -> list[Question]:
    """`count` questions of workload `name`, from number `start` on: no two alike until every manner is used up.

    The mix takes the classes in turn. The list is endless: after the last question it begins again in another manner.
    """
    known = _read(name)
    chosen = []
    for number in range(start, start + count):
        turn, index = divmod(number, len(known))
        manner = MANNERS[turn % len(MANNERS)]
        *before, last = known[index].chat
        text = f"{last['content']} {manner}".rstrip()
        chosen.append(Question(known[index].workload, [*before, {**last, "content": text}]))
    return chosen
