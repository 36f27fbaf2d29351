"""Which faults a seed gives, and whom they hit."""

from __future__ import annotations

from dsde.chaos.plan import Planned, plan


def test_a_seed_gives_the_same_faults_again_and_another_one_others() -> None:
    wanted = (("engine", "replica", "stall"), 30.0, 1200.0)
    first = plan(1, *wanted)
    assert first == plan(1, *wanted) != plan(2, *wanted)
    assert [one.at_s for one in first] == [30.0 * number for number in range(1, 41)]
    assert {one.kind for one in first} == set(wanted[0])


def test_no_fault_comes_after_the_end() -> None:
    assert plan(0, ("engine",), 30.0, 29.0) == []
    assert [one.at_s for one in plan(0, ("engine",), 30.0, 60.0)] == [30.0, 60.0]


def test_the_draw_picks_a_victim_whatever_their_order() -> None:
    picked = [Planned(0.0, "engine", draw).victim(pids) for draw in (0.0, 0.49, 0.5, 0.99) for pids in ([7, 3], [3, 7])]
    assert picked == [3, 3, 3, 3, 7, 7, 7, 7]
