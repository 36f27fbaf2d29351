"""Mixed streams while faults come, each compared with the answer that came before the first fault."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from dsde.chaos.stream import Stream, over_grpc, over_http

__all__ = ["PROMPTS", "TOKENS", "Traffic", "Verdict", "fault_of"]

TOKENS = 48
"""Tokens of an answer."""
# Whoever continues one of these is sure of every next token: bfloat16 may flip a tie between two ways to compute it.
PROMPTS = (
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z A B C D E F G",
    "red, green, blue, red, green, blue, red, green, blue, red, green, blue,",
    "東京、大阪、京都、東京、大阪、京都、東京、大阪、京都、東京、大阪、京都、東京、",
)
_GREEDY, _SAMPLED, _SEVERAL = "greedy", "sampled", "several"
_WEIGHTS = {_GREEDY: 7, _SAMPLED: 2, _SEVERAL: 1}
_SHOWN = 20
# What a client waits that was refused.
_PAUSE_S = 1.0


@dataclass(slots=True)
class Verdict:
    """Streams by what became of them.

    lost: neither an end nor an error. duplicated: more tokens than were asked for or counted. wrong: others than
    without a fault, or too few. errors_explicit: ended with an error event, an HTTP status or a gRPC status.
    resumed: went on on another engine. faults: those that were injected.
    """

    requests: int = 0
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    errors_explicit: int = 0
    resumed: int = 0
    faults: int = 0

    @property
    def holds(self) -> bool:
        """Whether nothing was lost, duplicated or wrong."""
        return not (self.lost or self.duplicated or self.wrong)

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


def fault_of(stream: Stream, count: int, expected: tuple[list[int], str] | None) -> str | None:
    """The Verdict field that an ended stream belongs to, None for an answer as it should be.

    count: tokens that were asked for. expected: token ids and text without a fault; None for a sampled answer.
    """
    if len(stream.ids) > count or (stream.usage is not None and len(stream.ids) > stream.usage[1]):
        return "duplicated"
    if expected is not None and stream.ids != expected[0][: len(stream.ids)]:
        return "wrong"
    if stream.error is not None:
        return "errors_explicit"
    if not stream.ended:
        return "lost"
    if len(stream.ids) != count or stream.usage is None or stream.usage[1] != count:
        return "wrong"
    return "wrong" if expected is not None and stream.text != expected[1] else None


class Traffic:
    """A context manager: `streams` at once from its beginning to its end, over HTTP at `url` and gRPC at `address`.

    url: ends in /v1. The seed decides what is asked. Its end waits for the streams that run. Raises ValueError naming
    --url where the answers to compare with do not come.
    """

    def __init__(self, url: str, address: str, streams: int, seed: int, api_key: str | None = None) -> None:
        self._url, self._address, self._api_key = url, address, api_key
        self._seed = seed
        self._threads = [threading.Thread(target=self._send, args=(number,), daemon=True) for number in range(streams)]
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._expected: Mapping[str, tuple[list[int], str]] = {}
        self.verdict = Verdict()
        # The first of what is not as it should be.
        self.complaints: list[str] = []

    def __enter__(self) -> Traffic:
        self._expected = {prompt: self._reference(prompt) for prompt in PROMPTS}
        for one in self._threads:
            one.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        # Whoever interrupts it waits for nothing.
        for one in self._threads if error is None else ():
            one.join()

    def _reference(self, prompt: str) -> tuple[list[int], str]:
        stream = Stream(prompt, _options(_GREEDY, 0))
        over_http(self._url, stream, self._api_key)
        if not stream.ended:
            raise ValueError(f"--url {self._url}: {stream.error or 'no answer'}; accepted: where `dsde serve` serves")
        return stream.ids, stream.text

    def _send(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        while not self._over.is_set():
            kind = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
            stream = Stream(draw.choice(PROMPTS), _options(kind, draw.getrandbits(32)), draw.choice((None, "static")))
            if kind == _SEVERAL or draw.random() < 0.5:
                over_http(self._url, stream, self._api_key)
            else:
                over_grpc(self._address, stream, self._api_key)
            self._book(kind, stream)
            if stream.error is not None:
                self._over.wait(_PAUSE_S)

    def _book(self, kind: str, stream: Stream) -> None:
        expected = self._expected[stream.prompt] if kind == _GREEDY else None
        fault = fault_of(stream, TOKENS * stream.options.get("n", 1), expected)
        with self._lock:
            self.verdict.requests += 1
            self.verdict.resumed += stream.resumed
            if fault is None:
                return
            setattr(self.verdict, fault, getattr(self.verdict, fault) + 1)
            if len(self.complaints) < _SHOWN:
                told = stream.error or f"{len(stream.ids)} tokens: {stream.text[-60:]!r}"
                self.complaints.append(f"{fault}: {kind} {stream.prompt[:12]!r}: {told}")


def _options(kind: str, seed: int) -> dict[str, Any]:
    common: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    if kind == _GREEDY:
        return {**common, "temperature": 0}
    return {**common, "temperature": 1.0, **({"n": 2} if kind == _SEVERAL else {"seed": seed})}
