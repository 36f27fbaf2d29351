"""Lets the drafter rest while nobody speculates, and read what it missed in the first pass of the next drafting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput

from dsde.control.records import SpeculationPlan
from dsde.engine.backlog import DraftBacklog, Span
from dsde.engine.slot_tokens import SlotTokens

__all__ = ["CatchUp"]


class CatchUp:
    """The backlog of one worker's draft model.

    Positions are the host's: when a step drafts, vLLM has corrected them for the drafts that the step before rejected,
    also in asynchronous scheduling. Token ids are the device's.

    A request whose backlog no forward pass can take beside the batch is left behind and speculates no more. One that
    only has to wait for others' backlogs drafts poorly until its turn, which costs acceptance, never correctness.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._num_scheduled: Mapping[str, int] = {}
        self._booked = True
        self.read_more = self.read_backlog = False
        self.left_behind: tuple[str, ...] = ()

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Start an engine step: forget requests that ended or lost their blocks."""
        self._booked = not scheduled.total_num_scheduled_tokens
        self.read_more = self.read_backlog = False
        self.left_behind = ()
        self._backlog.forget(scheduled.finished_req_ids)
        self._backlog.forget(scheduled.scheduled_cached_reqs.resumed_req_ids)
        self._num_scheduled = scheduled.num_scheduled_tokens

    def launched(self) -> None:
        """Note the tokens of the target's forward pass, which has been launched; call it before anything is drafted."""
        count = sum(self._num_scheduled.values())
        if count:
            self._slot_tokens.write(self._table.slot_mapping.gpu[:count], self._runner.input_ids.gpu[:count])

    def rest(self, sampled_token_ids: torch.Tensor) -> torch.Tensor:
        """Draft nothing: [B, 0]. sampled_token_ids: [B, 1 + K] of this step, -1 after the last accepted one.

        In asynchronous scheduling the next step takes its input, and the count of what was accepted, from the drafting;
        where nothing was verified, vLLM sees to that without one.
        """
        runner = self._runner
        runner._draft_probs = runner._draft_prob_req_ids = None
        if runner.use_async_scheduling and sampled_token_ids.shape[1] > 1:
            next_token_ids, num_valid = runner.drafter.prepare_next_token_ids_padded(
                sampled_token_ids, runner.requests, runner.input_batch, runner.discard_request_mask.gpu
            )
            runner._copy_valid_sampled_token_count(next_token_ids, num_valid)
        return torch.empty((runner.input_batch.num_reqs, 0), dtype=torch.int64, device=runner.device)

    def end(self) -> None:
        """End an engine step: where nothing was drafted, everything it scheduled is unread."""
        if not self._booked:
            self._backlog.rested(self._spans_of_batch())
            self._booked = True

    def widen(self, inputs: Mapping[str, Any], plan: SpeculationPlan) -> dict[str, Any]:
        """The drafter's inputs with each planned request's backlog in front of its own tokens.

        inputs: the keyword arguments of vLLM's propose(). Books what the coming pass reads.
        """
        backlog, spans = self._backlog, self._spans_of_batch()
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
        return self._widened(inputs, gaps, spans) if any(gaps) else dict(inputs)

    # The KV cache comes after the worker, and before its first step.
    @cached_property
    def _backlog(self) -> DraftBacklog:
        return DraftBacklog(*self._kernel_blocks)

    @cached_property
    def _slot_tokens(self) -> SlotTokens:
        num_blocks, block_size = self._kernel_blocks
        return SlotTokens(num_blocks * block_size, self._runner.device)

    @property
    def _kernel_blocks(self) -> tuple[int, int]:
        """(number, size) of the kernels' blocks, which the table counts in; they may be fractions of the manager's."""
        cache, size = self._runner.kv_cache_config, self._table.block_size
        group = cache.kv_cache_groups[self._runner.drafter.kv_cache_gid]
        return cache.num_blocks * (group.kv_cache_spec.block_size // size), size

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

    def _widened(self, inputs: Mapping[str, Any], gaps: Sequence[int], spans: Sequence[Span]) -> dict[str, Any]:
        metadata, device = inputs["common_attn_metadata"], self._runner.device
        lengths = metadata.query_start_loc_cpu.diff().numpy() + gaps
        ends = np.add.accumulate(lengths)
        rows = np.repeat(np.arange(len(spans)), lengths)
        # Of each request, the positions from the start of its gap to the end of its own tokens.
        firsts = np.array([span.start - gap for span, gap in zip(spans, gaps, strict=True)])
        positions = np.arange(ends[-1]) + (firsts - ends + lengths)[rows]
        size = self._table.block_size
        slots = self._table.block_table.np[rows, positions // size].astype(np.int64) * size + positions % size
        shift = np.add.accumulate([0, *gaps], dtype=np.int32)
        wider = metadata.replace(
            query_start_loc=metadata.query_start_loc + async_tensor_h2d(shift, device=device),
            query_start_loc_cpu=metadata.query_start_loc_cpu + torch.from_numpy(shift),
            num_actual_tokens=int(ends[-1]),
            max_query_len=int(lengths.max()),
        )
        return {
            **inputs,
            "target_token_ids": self._slot_tokens.read(async_tensor_h2d(slots, device=device)),
            "target_positions": async_tensor_h2d(positions, device=device),
            "common_attn_metadata": wider,
        }
