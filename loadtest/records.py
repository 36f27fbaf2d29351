"""What is known of a request when it is over, whichever way it went; one JSON object a line in files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = ["RECORDS", "SPECULATION", "Record", "read_records", "write_records"]

RECORDS = "records.jsonl"
"""Name of the file in a report's directory."""
SPECULATION = ("speculative_decoding", "dsde")
"""Figures that only our servers send."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are seconds from the start of the run, None where it never came so far.

    request_id: as sent; answer_id: as the answer says it, which holds the other one. workload: class of the prompt.
    protocol: http or grpc. server: which of several it went to. scheduled_s: when it was due, started_s: when it left.
    received_tokens: those that came in messages, also of an answer that broke off; completion_tokens: the server's own
    count. gaps_ms: times between messages with tokens; a message brings an accepted draft's tokens together, so they
    are fewer than tokens. error: its kind, None where it was answered; detail: its text.
    speculation: `metrics.speculative_decoding` of the answer, `dsde` inside.
    """

    request_id: str
    workload: str
    protocol: str
    scheduled_s: float
    started_s: float
    end_s: float
    server: str = ""
    answer_id: str | None = None
    first_token_s: float | None = None
    received_tokens: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    gaps_ms: Sequence[float] = field(default_factory=list)
    error: str | None = None
    detail: str | None = None
    speculation: Mapping[str, Any] | None = None

    @property
    def dsde(self) -> Mapping[str, Any] | None:
        """The answer's `dsde` object."""
        return None if self.speculation is None else self.speculation.get("dsde")

    @property
    def late_ms(self) -> float:
        """How much after its time it left."""
        return (self.started_s - self.scheduled_s) * 1000

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, from the start."""
        return None if self.first_token_s is None else (self.first_token_s - self.started_s) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first."""
        if self.first_token_s is None or self.error is not None or (self.completion_tokens or 0) < 2:
            return None
        assert self.completion_tokens is not None
        return (self.end_s - self.first_token_s) * 1000 / (self.completion_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """From the start to the end of the answer."""
        return None if self.error is not None else (self.end_s - self.started_s) * 1000

    def missing(self) -> list[str]:
        """Figures an answer should have brought and did not."""
        if self.error is not None:
            return []
        found = {
            "first_token_s": self.first_token_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason or None,
            "speculative_decoding": self.speculation,
            "dsde": self.dsde or None,
            "request_id": None if self.request_id not in (self.answer_id or "") else self.answer_id,
        }
        return [name for name, value in found.items() if value is None]

    def to_dict(self) -> dict[str, Any]:
        """With the class under its own name, and without what is None."""
        tree = asdict(self)
        tree = {"request_id": tree.pop("request_id"), "class": tree.pop("workload"), **tree}
        return {name: value for name, value in tree.items() if value is not None}


def write_records(file: Path, records: Iterable[Record]) -> None:
    """Write them, one JSON object a line."""
    with file.open("w") as lines:
        for record in records:
            lines.write(json.dumps(record.to_dict()) + "\n")


def read_records(place: Path) -> list[Record]:
    """The records of a file, or of a report's directory. Raises ValueError naming the place and the line."""
    file = place / RECORDS if place.is_dir() else place
    if not file.is_file():
        raise ValueError(f"{place}: accepted: a directory that --report wrote, or its {RECORDS}")
    known = {one.name for one in fields(Record)}
    found = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            tree = json.loads(line)
            tree["workload"] = tree.pop("class")
            found.append(Record(**{name: value for name, value in tree.items() if name in known}))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{file}, line {number} is no record of a load test") from None
    if not found:
        raise ValueError(f"{file} holds no record")
    return found
