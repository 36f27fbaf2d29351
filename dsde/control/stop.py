"""Stop rules of a batch whose requests follow different policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dsde.control.arrays import Bools, Numbers
from dsde.control.records import DraftStop

__all__ = ["combine"]


def combine(
    rules: Sequence[DraftStop | None], parts: Sequence[Iterable[str]], lengths: Mapping[str, int]
) -> DraftStop | None:
    """One rule for a batch in parts of request ids; a part without a rule of its own drafts its planned lengths."""
    if len(rules) == 1:
        return rules[0]
    if all(rule is None for rule in rules):
        return None
    return _MixedStop(tuple((rule, tuple(ids)) for rule, ids in zip(rules, parts, strict=True)), dict(lengths))


@dataclass(frozen=True, slots=True)
class _MixedStop:
    parts: tuple[tuple[DraftStop | None, tuple[str, ...]], ...]
    lengths: dict[str, int]
    bound: tuple[tuple[DraftStop | None, tuple[int, ...]], ...] = ()
    planned: tuple[int, ...] = field(default=())

    def bind(self, request_ids: Sequence[str]) -> DraftStop:
        rows = {request_id: row for row, request_id in enumerate(request_ids)}
        bound = []
        for rule, ids in self.parts:
            here = [i for i in ids if i in rows]
            bound.append((rule and rule.bind(here), tuple(rows[i] for i in here)))
        return replace(self, bound=tuple(bound), planned=tuple(self.lengths.get(i, 0) for i in request_ids))

    def goes_on(self, step: int, top_prob: Numbers, entropy: Numbers) -> Bools:
        wanted = np.array(self.planned) > step + 1
        for rule, rows in self.bound:
            if rule is not None and rows:
                index = list(rows)
                wanted[index] &= rule.goes_on(step, top_prob[index], entropy[index])
        return wanted
