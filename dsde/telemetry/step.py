"""What one engine step did, in plain numbers, on its way from the scheduler's process to the metrics."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["EngineStep"]


class EngineStep(NamedTuple):
    """One engine step. It crosses processes as a plain list.

    policy: the engine's default policy. requests: those that decoded. drafted, accepted: draft tokens they verified and
    accepted. emitted: tokens they got. kld_sum, positions: nats over the verified positions that were measured.
    depth, slots, used: of the drafting of this step: its longest length, depth times the requests planned, and the sum
    of their lengths; depth 0 = nobody drafts. may_draft: whether anybody was planned at all. reason: why the step
    drafts or not: policy, room (nobody can use a draft: last token, grammar) or context (past the draft's).
    controller_s: seconds spent in the controller.
    """

    policy: str = ""
    requests: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    kld_sum: float = 0.0
    positions: int = 0
    may_draft: bool = False
    depth: int = 0
    slots: int = 0
    used: int = 0
    reason: str = ""
    controller_s: float = 0.0
