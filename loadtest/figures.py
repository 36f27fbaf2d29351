"""Records summed up: per class and per protocol, what clients saw and what the server said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from loadtest.records import SPECULATION, Record

__all__ = ["ALL", "COLUMNS", "Column", "Slo", "Summary", "complaints", "summaries", "summarise"]

ALL = "all"
PERCENTILES = (50, 95, 99)
LATE_MS = 100.0
"""A start later than this says that this side was too slow for the rate."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer keeps to, in ms: time to first token, and time per output token after it."""

    ttft_ms: float
    tpot_ms: float

    def kept(self, record: Record) -> bool:
        """Whether the record's answer is a good one."""
        if record.error is not None or record.ttft_ms is None:
            return False
        return record.ttft_ms <= self.ttft_ms and (record.tpot_ms or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a group of requests. Percentiles are (p50, p95, p99) in ms; None where nothing was measured.

    tokens_per_s: tokens of complete answers over the time from the run's first start to its last end, so that groups
    add up to all. goodput_per_s: answers within the SLO per second of it. acceptance: accepted share of the draft
    tokens. acceptance_length: tokens per verification step. speculation_length: draft tokens per decoding step. kld,
    stability: means over answers, kld in nats. straggler_wait_ms: mean wait of an answer for longer members of its
    batches.
    replicas: answers by replica, where answers tell it. late_ms: p99 of starts after their time.
    """

    workload: str
    protocol: str
    requests: int
    errors: Mapping[str, int]
    incomplete: int
    ttft_ms: Sequence[float] | None
    inter_token_ms: Sequence[float] | None
    tpot_ms: Sequence[float] | None
    e2e_ms: Sequence[float] | None
    tokens_per_s: float
    goodput_per_s: float
    late_ms: float
    acceptance: float | None
    acceptance_length: float | None
    speculation_length: float | None
    kld: float | None
    stability: float | None
    straggler_wait_ms: float | None
    replicas: Mapping[str, int]


def summaries(records: Sequence[Record], slo: Slo) -> list[Summary]:
    """Of all, of each protocol, of each class, and of each class at each protocol where there are several."""
    workloads = sorted({one.workload for one in records})
    protocols = sorted({one.protocol for one in records})
    groups = [(ALL, ALL)]
    if len(protocols) > 1:
        groups += [(ALL, protocol) for protocol in protocols]
    if len(workloads) > 1:
        groups += [(workload, ALL) for workload in workloads]
    if len(protocols) > 1 and len(workloads) > 1:
        groups += [(workload, protocol) for workload in workloads for protocol in protocols]
    span_s = _span_s(records)
    found = []
    for workload, protocol in groups:
        own = [one for one in records if workload in (ALL, one.workload) and protocol in (ALL, one.protocol)]
        if own:
            found.append(summarise(own, slo, workload, protocol, span_s))
    return found


def summarise(
    records: Sequence[Record], slo: Slo, workload: str = ALL, protocol: str = ALL, span_s: float | None = None
) -> Summary:
    """The figures of one group, which is not empty. span_s: the time of the run it is a part of; None: it is all."""
    answered = [one for one in records if one.error is None]
    span_s = _span_s(records) if span_s is None else span_s
    figures = [one.dsde for one in answered if one.dsde]
    stats = [one.speculation for one in answered if one.speculation]
    drafted = sum(one.get("num_draft_tokens") or 0 for one in stats)
    accepted = sum(one.get("num_accepted_draft_tokens") or 0 for one in stats)
    verified = sum(one.get("num_spec_steps") or 0 for one in stats)
    steps = sum(one["steps"] for one in figures)
    lengths = sum(one["speculation_length"]["mean"] * one["steps"] for one in figures)
    return Summary(
        workload=workload,
        protocol=protocol,
        requests=len(records),
        errors=dict(Counter(one.error for one in records if one.error is not None).most_common()),
        incomplete=sum(bool(one.missing()) for one in records),
        ttft_ms=_percentiles(one.ttft_ms for one in records),
        inter_token_ms=_percentiles(gap for one in records for gap in one.gaps_ms),
        tpot_ms=_percentiles(one.tpot_ms for one in records),
        e2e_ms=_percentiles(one.e2e_ms for one in records),
        tokens_per_s=sum(one.completion_tokens or 0 for one in answered) / span_s if span_s > 0 else 0.0,
        goodput_per_s=sum(slo.kept(one) for one in records) / span_s if span_s > 0 else 0.0,
        late_ms=float(np.percentile([one.late_ms for one in records], 99)),
        acceptance=accepted / drafted if drafted else None,
        acceptance_length=1 + accepted / verified if verified else None,
        speculation_length=lengths / steps if steps else None,
        kld=_mean(one["kld"].get("mean") for one in figures),
        stability=_mean(one.get("stability") for one in figures),
        straggler_wait_ms=_mean(one["straggler"]["wait_ms"] for one in figures),
        replicas=dict(Counter(str(one["replica"]) for one in figures if one.get("replica")).most_common()),
    )


def complaints(records: Sequence[Record], *, bare: bool = False) -> list[str]:
    """What makes a run a failed one, a line each; none for a run without a fault.

    bare: the server is not ours, so that it owes no figures of speculation.
    """
    lines = []
    for kind, count in Counter(one.error for one in records if one.error is not None).most_common():
        first = next(one for one in records if one.error == kind)
        lines.append(f"{count} of {len(records)} requests failed: {kind}; {first.request_id}: {first.detail}")
    missing = Counter(name for one in records for name in one.missing() if not (bare and name in SPECULATION))
    for name, count in missing.most_common():
        first = next(one for one in records if name in one.missing())
        lines.append(f"{count} answers came without {name}, the first was {first.request_id} over {first.protocol}")
    if not any(one.error is None for one in records):
        lines.append("no request was answered")
    return lines


def _span_s(records: Sequence[Record]) -> float:
    return max((one.end_s for one in records), default=0.0) - min((one.started_s for one in records), default=0.0)


def _percentiles(values: Iterable[float | None]) -> tuple[float, ...] | None:
    known = [value for value in values if value is not None]
    return tuple(float(one) for one in np.percentile(known, PERCENTILES)) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Column(NamedTuple):
    """A column of every table. value: its figure, or its figures, of a summary. said: the server says it."""

    title: str
    value: Callable[[Summary], Any]
    digits: int = 0
    said: bool = False

    def text(self, summary: Summary) -> str:
        """As tables show it; "-" where nothing was measured."""
        value = self.value(summary)
        if value is None:
            return "-"
        if isinstance(value, Mapping):
            return ", ".join(f"{name}: {count}" for name, count in value.items()) or "-"
        if isinstance(value, tuple | list):
            return " / ".join(f"{one:.{self.digits}f}" for one in value)
        return f"{value:.{self.digits}f}"


COLUMNS = (
    Column("requests", lambda one: one.requests),
    Column("errors", lambda one: one.errors),
    Column("TTFT ms", lambda one: one.ttft_ms),
    Column("inter-token ms", lambda one: one.inter_token_ms),
    Column("per token ms", lambda one: one.tpot_ms),
    Column("end to end ms", lambda one: one.e2e_ms),
    Column("tokens/s", lambda one: one.tokens_per_s, 1),
    Column("goodput/s", lambda one: one.goodput_per_s, 2),
    Column("acceptance", lambda one: one.acceptance, 2, said=True),
    Column("tokens/step", lambda one: one.acceptance_length, 2, said=True),
    Column("speculation length", lambda one: one.speculation_length, 2, said=True),
    Column("KLD", lambda one: one.kld, 3, said=True),
    Column("stability", lambda one: one.stability, 2, said=True),
    Column("straggler wait ms", lambda one: one.straggler_wait_ms, said=True),
    Column("replicas", lambda one: one.replicas, said=True),
)
