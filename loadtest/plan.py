"""The requests of a run: prompts drawn from a mix, put on arrival times and protocols."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from loadtest.exchange import Request
from loadtest.workload import Prompt

__all__ = ["GRPC", "HTTP", "PROTOCOLS", "Manner", "plan"]

HTTP, GRPC = "http", "grpc"
PROTOCOLS = {"http": (HTTP,), "grpc": (GRPC,), "mixed": (HTTP, GRPC)}
"""What --protocol takes -> the protocols that requests take in turn."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How prompts become requests, where it is not their own choice.

    longest: cap of output_tokens. temperature: replaces every prompt's. seed: of the sampling, counted up from request
    to request.
    """

    longest: int | None = None
    temperature: float | None = None
    policy: str | None = None
    ignore_eos: bool = False
    seed: int = 0

    def of(self, prompt: Prompt, number: int) -> Prompt:
        """The prompt as request `number` sends it."""
        sampling = dict(prompt.sampling)
        if self.temperature is not None:
            sampling["temperature"] = self.temperature
        if sampling.get("temperature", 1.0) > 0:
            sampling.setdefault("seed", self.seed + number)
        length = prompt.output_tokens if self.longest is None else min(self.longest, prompt.output_tokens)
        return replace(prompt, output_tokens=length, sampling=sampling)


def plan(
    prompts: Iterator[Prompt], times: Sequence[float], protocols: Sequence[str], manner: Manner, name: str
) -> list[Request]:
    """One request for each of `times`, in seconds. name: begins every id, and tells runs apart.

    Every class takes the protocols in turn, classes beginning with one and with the other, so that each protocol sees
    every class.
    """
    turns: dict[str, Iterator[str]] = {}
    requests = []
    for number, (at_s, drawn) in enumerate(zip(times, prompts, strict=False)):
        if drawn.workload not in turns:
            first = len(turns) % len(protocols)
            turns[drawn.workload] = itertools.cycle([*protocols[first:], *protocols[:first]])
        requests.append(
            Request(
                request_id=f"{name}-{number}",
                prompt=manner.of(drawn, number),
                protocol=next(turns[drawn.workload]),
                at_s=at_s,
                policy=manner.policy,
                ignore_eos=manner.ignore_eos,
            )
        )
    return requests
