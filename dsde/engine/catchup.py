"""Lets the drafter rest while nobody speculates, and read what it missed in the first pass of the next drafting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from dsde.control.records import SpeculationPlan
from dsde.engine.backlog import DraftBacklog, Span

__all__ = ["CatchUp"]


class CatchUp:
    """The backlog of one worker's draft model; synchronous scheduling only, where the host knows every position.

    A request whose backlog no forward pass can take beside the batch is left behind and speculates no more. One that
    only has to wait for others' backlogs drafts poorly until its turn, which costs acceptance, never correctness.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._backlog: DraftBacklog | None = None
        self._num_scheduled: Mapping[str, int] = {}
        self._booked = True
        self.read_more = self.read_backlog = False
        self.left_behind: tuple[str, ...] = ()

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Start an engine step: forget requests that ended or lost their blocks."""
        self._booked = not scheduled.total_num_scheduled_tokens
        self.read_more = self.read_backlog = False
        self.left_behind = ()
        if self._backlog is not None:
            self._backlog.forget(scheduled.finished_req_ids)
            self._backlog.forget(scheduled.scheduled_cached_reqs.resumed_req_ids)
        self._num_scheduled = scheduled.num_scheduled_tokens

    def end(self) -> None:
        """End an engine step: where nothing was drafted, everything it scheduled is unread."""
        if not self._booked:
            self._ensure().rested(self._spans_of_batch())
            self._booked = True

    def widen(self, inputs: Mapping[str, Any], plan: SpeculationPlan) -> dict[str, Any]:
        """The drafter's inputs with each planned request's backlog in front of its own tokens.

        inputs: the keyword arguments of vLLM's propose(). Books what the coming pass reads.
        """
        backlog, spans = self._ensure(), self._spans_of_batch()
        missing = [backlog.gap(span) for span in spans]
        metadata = inputs["common_attn_metadata"]
        # One slot per request is the drafter's own, for the token just sampled.
        room = self._runner.drafter.input_ids.shape[0] - metadata.num_actual_tokens - len(spans)
        gaps = [0] * len(spans)
        planned = [plan.lengths.get(span.request_id, 0) > 0 or not plan.lengths for span in spans]
        self.left_behind = tuple(
            span.request_id for row, span in enumerate(spans) if planned[row] and missing[row] > room
        )
        for row in sorted(range(len(spans)), key=missing.__getitem__):
            span, gap = spans[row], missing[row]
            if gap and (gap > room or not planned[row]):
                backlog.rested([span])
                continue
            gaps[row] = gap
            room -= gap
            backlog.caught_up(span)
        self._booked = True
        prompts = metadata.max_query_len > 1 + self._runner.num_spec_tokens
        self.read_more = any(gaps) or prompts
        self.read_backlog = any(gaps) and not prompts
        return _widened(inputs, gaps, spans, self._runner.input_batch.token_ids_cpu) if any(gaps) else dict(inputs)

    def _ensure(self) -> DraftBacklog:
        if self._backlog is None:
            table = self._table
            cache = self._runner.kv_cache_config
            # The kernels' blocks, which the table counts in, may be fractions of the cache manager's.
            group = cache.kv_cache_groups[self._runner.drafter.kv_cache_gid]
            num_blocks = cache.num_blocks * (group.kv_cache_spec.block_size // table.block_size)
            self._backlog = DraftBacklog(num_blocks, table.block_size)
        return self._backlog

    @property
    def _table(self) -> Any:
        return self._runner.input_batch.block_table[self._runner.drafter.kv_cache_gid]

    def _spans_of_batch(self) -> list[Span]:
        batch, table = self._runner.input_batch, self._table
        return [
            Span(
                request_id=request_id,
                start=int(batch.num_computed_tokens_cpu[row]),
                length=self._num_scheduled[request_id],
                blocks=table.block_table.np[row],
            )
            for row, request_id in enumerate(batch.req_ids)
        ]


def _widened(inputs: Mapping[str, Any], gaps: Sequence[int], spans: Sequence[Span], token_ids: Any) -> dict[str, Any]:
    metadata = inputs["common_attn_metadata"]
    start_of = metadata.query_start_loc_cpu.tolist()
    tokens: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    for row, (gap, span) in enumerate(zip(gaps, spans, strict=True)):
        if gap:
            unread = slice(span.start - gap, span.start)
            tokens.append(torch.from_numpy(token_ids[row, unread]).to(inputs["target_token_ids"]))
            positions.append(torch.arange(unread.start, unread.stop).to(inputs["target_positions"]))
        own = slice(start_of[row], start_of[row + 1])
        tokens.append(inputs["target_token_ids"][own])
        positions.append(inputs["target_positions"][own])
    shift = torch.tensor([0, *gaps], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    query_start_loc_cpu = metadata.query_start_loc_cpu + shift
    wider = metadata.replace(
        query_start_loc=metadata.query_start_loc + shift.to(metadata.query_start_loc.device),
        query_start_loc_cpu=query_start_loc_cpu,
        num_actual_tokens=int(query_start_loc_cpu[-1]),
        max_query_len=int(query_start_loc_cpu.diff().max()),
    )
    return {
        **inputs,
        "target_token_ids": torch.cat(tokens),
        "target_positions": torch.cat(positions),
        "common_attn_metadata": wider,
    }
