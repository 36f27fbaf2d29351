"""The prompts: one JSON Lines file per class, written for this project, and mixes of them.

A line is {"class", "messages", "output_tokens", "sampling"}: a chat, how long its answer is expected to get, and OpenAI
sampling parameters.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["WORKLOADS", "Prompt", "classes", "draw", "prompt", "read"]

WORKLOADS = Path(__file__).parent / "workloads"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks.

    workload: its class. messages: an OpenAI chat. output_tokens: expected length of the answer, sent as its limit.
    sampling: OpenAI sampling parameters; what is absent is the server's choice. at_s: seconds after the start of the
    trace it comes from, None where no trace says so.
    """

    workload: str
    messages: Sequence[Mapping[str, str]]
    output_tokens: int
    sampling: Mapping[str, float] = field(default_factory=dict)
    at_s: float | None = None


def classes() -> tuple[str, ...]:
    """The eight classes, in alphabetical order; they stand for the data sets of the paper, and hold none of them.

    summary CNN/DM, abstract XSum, math GSM8K, reasoning HotpotQA, facts NQ, code HumanEval, chat ShareGPT,
    translation WMT14.
    """
    return tuple(sorted(file.stem for file in WORKLOADS.glob("*.jsonl")))


@cache
def read(name: str) -> tuple[Prompt, ...]:
    """The prompts of one class, in the order of its file."""
    lines = (WORKLOADS / f"{name}.jsonl").read_text().splitlines()
    return tuple(prompt(json.loads(line)) for line in lines)


def prompt(line: Mapping[str, Any]) -> Prompt:
    """A parsed line. Raises KeyError, TypeError or ValueError where it is not as the module says."""
    messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in line["messages"]]
    if not messages:
        raise ValueError("messages is empty")
    return Prompt(
        workload=str(line["class"]),
        messages=messages,
        output_tokens=int(line["output_tokens"]),
        sampling={str(name): float(value) for name, value in line.get("sampling", {}).items()},
    )


def draw(prompts: Sequence[Prompt], weights: Mapping[str, float], seed: int) -> Iterator[Prompt]:
    """Prompts without end. weights: class -> its share, relative; classes that are not named are left out.

    Shares hold as exactly as whole requests allow from the first request on: next comes the class that is furthest
    behind. Within a class the order is shuffled by `seed`, anew each time all of its prompts were used.
    """
    pools = {name: [one for one in prompts if one.workload == name] for name in weights}
    orders: dict[str, list[Prompt]] = {name: [] for name in weights}
    taken = dict.fromkeys(weights, 0)
    chance = random.Random(seed)
    while True:
        name = min(weights, key=lambda one: (taken[one] + 1) / weights[one])
        if not orders[name]:
            orders[name] = chance.sample(pools[name], len(pools[name]))
        taken[name] += 1
        yield orders[name].pop()
