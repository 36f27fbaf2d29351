"""What is published, and what is learnt of classes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsde.routing.prefixes import Prefixes
from dsde.routing.request import BLOCK, MAX_BLOCKS, describe
from dsde.routing.stats import PUBLISHED, ClassStats, ClassTable, ReplicaStats, acceptance

STATS = ReplicaStats(3, 2, 1, 32, 0.5, (20.0, 0.1), 1.5, 2.5, 0.02, classes={"greedy": ClassStats(1, 20, 5, 20, 15)})


def test_a_publication_survives_json() -> None:
    assert ReplicaStats.from_dict(json.loads(json.dumps(STATS.to_dict()))) == STATS


@pytest.mark.parametrize(
    "change",
    [{"verify_ms": [1.0]}, {"running": "many"}, {"classes": {"a": [1, 2, 3, 4, 5, 6]}}, {"draft_ms": float("nan")}],
)
def test_what_another_version_publishes_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="routing stats"):
        ReplicaStats.from_dict({**STATS.to_dict(), **change})
    with pytest.raises(ValueError, match="KeyError"):
        ReplicaStats.from_dict({"number": 1})


@pytest.mark.parametrize(("alpha", "length"), [(0.3, 1), (0.6, 4), (0.9, 8)])
def test_acceptance_does_not_depend_on_the_length(alpha: float, length: int) -> None:
    accepted = sum(alpha**j for j in range(1, length + 1))
    assert acceptance(100, 100 * length, 100 * accepted) == pytest.approx(alpha, abs=1e-3)


def test_classes_are_averaged_over_the_newest_and_their_number_is_bounded() -> None:
    table = ClassTable(remembered=40)
    for number in range(500):
        table.finish(["all", f"kind {number}"], ClassStats(1.0, 10.0 if number < 250 else 30.0))
    newest = table.newest()
    assert len(newest) == PUBLISHED
    assert newest["all"].requests == pytest.approx(50.0, rel=0.01)
    assert newest["all"].output / newest["all"].requests == pytest.approx(30.0, rel=0.01)
    assert "kind 499" in newest
    assert len(table.newest(1000)) == 40


def test_classes_go_by_hint_template_size_and_temperature() -> None:
    chat = describe([7] * 100, temperature=0.7, max_tokens=200)
    longer = describe([7] * 120, temperature=0.9, max_tokens=250)
    other = describe([8] * 100, temperature=0.7, max_tokens=200)
    assert chat.classes == longer.classes
    assert chat.classes[0] != other.classes[0]
    assert chat.classes[1:] == other.classes[1:]
    assert describe([7] * 100, temperature=0.0, max_tokens=200).classes[-1] == "greedy"
    assert describe([7], temperature=0.0, max_tokens=None, hint="x" * 99).classes[0] == "x" * 32 + "/greedy"


def test_equal_blocks_mean_equal_prefixes() -> None:
    one, two = list(range(300)), [*range(BLOCK), -1, *range(BLOCK + 1, 300)]
    first, second = (describe(ids, temperature=0, max_tokens=1).blocks for ids in (one, two))
    assert len(first) == 300 // BLOCK
    assert first[0] == second[0]
    assert set(first[1:]).isdisjoint(second[1:])
    assert len(describe([1] * 100_000, temperature=0, max_tokens=1).blocks) == MAX_BLOCKS


def test_prefixes_are_matched_from_their_start_and_forgotten() -> None:
    known = Prefixes(remembered=6)
    known.sent((1, 2, 3), row=0)
    known.sent((1, 2, 9), row=1)
    assert known.matched((1, 2, 3, 4)) == {0: 3, 1: 2}
    assert known.matched((3,)) == {0: 1}
    known.forget(0)
    assert known.matched((1, 2, 3)) == {1: 2}
    known.sent((21, 22, 23, 24, 25), row=2)
    assert known.matched((1, 2, 9)) == {}
