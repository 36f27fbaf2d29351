"""What must hold between an answer's figures and the tokens it brought."""

from __future__ import annotations

import math
from typing import Any


def check_figures(metrics: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
    """Assert it, and return the answer's `dsde` object."""
    spec = metrics["speculative_decoding"]
    dsde = spec["dsde"]
    limit = dsde["speculation_length"]["limit"]
    histogram = spec["acceptance_histogram"]

    assert len(histogram) == spec["num_spec_tokens"] + 1
    assert sum(histogram) == spec["num_spec_steps"] == dsde["steps"] - dsde["steps_off"]
    accepted = spec["num_accepted_draft_tokens"]
    assert sum(length * count for length, count in enumerate(histogram)) == accepted <= spec["num_draft_tokens"]

    # The prompt's step gives one token, every later step one and its accepted drafts; an end inside them cuts the rest.
    # Of an answer that was resumed the figures are the last engine's.
    before = dsde.get("resumed", {"tokens": 0})["tokens"]
    cut = 1 + dsde["steps"] + accepted - (completion_tokens - before)
    assert 0 <= cut <= dsde["speculation_length"]["max"]

    assert (
        0 <= dsde["speculation_length"]["mean"] <= dsde["speculation_length"]["max"] <= limit <= spec["num_spec_tokens"]
    )
    assert all(math.isfinite(number) for number in _numbers(spec))
    if spec["num_draft_tokens"]:
        assert 0 <= dsde["kld"]["mean"] <= dsde["kld"]["max"]
        assert 0 <= dsde["stability"] <= 1
        assert 0 <= dsde["expected_acceptance_rate"] <= 1
    return dsde


def _numbers(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in _numbers(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in _numbers(value)]
    return [tree] if isinstance(tree, int | float) else []
