"""The router's books: publications, staleness, draining, other routers, and what is forgotten."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dsde.routing.choice import LATE, UNSENT_S, StabilityAware
from dsde.routing.request import Request, describe
from dsde.routing.stats import ClassStats, ReplicaStats

PLAIN = Request(("greedy",), prompt_tokens=10, max_tokens=100)


def stats(number: int = 1, **other: Any) -> ReplicaStats:
    made = ReplicaStats(number, running=0, waiting=0, slots=32, verify_ms=(20.0, 0.1), draft_ms=1.5)
    return replace(made, **other)


def router(replicas: str = "ab", **other: Any) -> StabilityAware[str]:
    made = StabilityAware[str](seed=0, **other)
    for replica in replicas:
        made.add(replica)
        made.published(replica, stats(), 0.0)
    return made


def first(made: StabilityAware[str], candidates: str = "ab", now: float = 1.0, request: Request = PLAIN) -> str:
    ranks = made.choose("asked", request, list(candidates), now)
    made.completed("asked", ranks[0][0])
    return ranks[0][0]


def test_its_own_bookings_count_between_publications() -> None:
    made = router()
    places = [made.choose(str(number), PLAIN, ["a", "b"], 1.0)[0][0] for number in range(6)]
    assert sorted(places) == ["a"] * 3 + ["b"] * 3
    for number, place in enumerate(places):
        if place == "b":
            made.completed(str(number), place)
    assert first(made) == "b"


def test_what_a_publication_says_of_costs_is_used() -> None:
    made = router()
    made.published("a", stats(2, verify_ms=(80.0, 0.4)), 1.0)
    assert first(made) == "b"


def test_a_difference_that_noise_accounts_for_outweighs_no_request() -> None:
    made = router()
    for number in (2, 3):
        made.published("a", stats(number, verify_ms=(25.0, 0.12), draft_ms=1.9), 1.0)
        made.published("b", stats(number, verify_ms=(17.0, 0.08), draft_ms=1.2), 1.0)
    made.routed("one", PLAIN, "b", 1.0)
    assert first(made) == "a"
    made.published("a", stats(4, verify_ms=(60.0, 0.3), draft_ms=4.0), 2.0)
    assert first(made, now=2.0) == "b"


def test_chance_decides_between_equals() -> None:
    made = router("abc")
    assert {first(made, "abc") for _ in range(40)} == set("abc")
    made.routed("one", PLAIN, "a", 1.0)
    assert {first(made, "abc") for _ in range(40)} == set("bc")


def test_a_replica_that_was_slow_is_tried_again_when_it_has_been_idle() -> None:
    made = router()
    for number in (2, 3):
        made.published("a", stats(number, verify_ms=(60.0, 0.3), draft_ms=4.0), 1.0)
    assert {first(made) for _ in range(20)} == {"b"}
    for now in range(2, 40):
        made.published("a", stats(now + 2, verify_ms=(60.0, 0.3), draft_ms=4.0), now)
        made.published("b", stats(now + 2), now)
    assert {first(made, now=40.0) for _ in range(20)} == {"a", "b"}
    # It has worked since, and is as slow as it was.
    made.published("a", stats(50, verify_ms=(60.0, 0.31), draft_ms=4.0), 40.0)
    assert {first(made, now=40.0) for _ in range(20)} == {"b"}


def test_a_replica_that_took_tokens_for_free_does_not_get_all_requests() -> None:
    made = router()
    for number in (2, 3):
        made.published("a", stats(number, verify_ms=(105.0, 0.0), draft_ms=30.0), 1.0)
        made.published("b", stats(number, verify_ms=(105.0, 5.0), draft_ms=30.0), 1.0)
    for number in range(10):
        made.routed(str(number), PLAIN, first(made), 1.0)
    on_a = sum(booked.row == made._rows["a"] for booked in made._booked.values())
    assert 4 <= on_a <= 8


def test_where_all_took_tokens_for_free_the_faster_one_does_not_get_all_requests() -> None:
    made = router()
    for number in (2, 3):
        made.published("a", stats(number, verify_ms=(105.0, 0.0), draft_ms=30.0), 1.0)
        made.published("b", stats(number, verify_ms=(260.0, 0.0), draft_ms=75.0), 1.0)
    places = [
        made.choose(str(number), Request(("greedy",), prompt_tokens=60, max_tokens=12), ["a", "b"], 1.0)[0][0]
        for number in range(22)
    ]
    assert set(places[:5]) == {"a"}
    assert 3 <= places.count("b") <= 11


def test_prompts_tell_what_a_token_takes_where_small_steps_do_not() -> None:
    made = router()
    for number in (2, 3):
        made.published("a", stats(number, verify_ms=(105.0, 0.0), draft_ms=30.0, prompt_ms=3.0), 1.0)
        made.published("b", stats(number, verify_ms=(210.0, 0.0), draft_ms=60.0, prompt_ms=6.0), 1.0)
    for number in range(22):
        made.choose(str(number), Request(("greedy",), prompt_tokens=60, max_tokens=12), ["a", "b"], 1.0)
    assert made.requests("a") + made.requests("b") == 22
    assert 8 <= made.requests("b") <= 11
    assert made.requests("another") == 0


def test_requests_of_other_routers_are_seen_in_publications() -> None:
    made = router()
    made.published("a", stats(2, running=9, waiting=3), 1.0)
    assert first(made) == "b"
    made.published("a", stats(3), 2.0)
    made.published("b", stats(2, running=2), 2.0)
    assert first(made, now=2.0) == "a"


def test_a_request_that_ended_since_is_not_taken_for_another_router_s() -> None:
    made = router()
    for number in range(4):
        made.routed(str(number), PLAIN, "a", 0.5)
    for number in range(4):
        made.completed(str(number), "a")
    # The snapshot is from before the four ended.
    made.published("a", stats(2, running=4), 1.0)
    made.routed("one", PLAIN, "b", 1.0)
    assert first(made) == "a"


def test_two_random_choices_while_most_publications_are_stale() -> None:
    made = router("abcd", stale_s=5.0)
    made.published("a", stats(2, verify_ms=(500.0, 9.0)), 3.0)
    seen = set()
    for _ in range(40):
        pair, others = made.choose("asked", PLAIN, list("abcd"), 7.0)
        assert sorted(pair + others) == list("abcd")
        assert len(pair) == 2
        seen |= set(pair)
    # Even the slow one gets its turns, since nobody knows how the others are.
    assert seen == set("abcd")
    for replica in "bcd":
        made.published(replica, stats(2), 7.0)
    assert first(made, "abcd", 7.0) != "a"


def test_a_publication_that_is_repeated_grows_stale() -> None:
    made = router(stale_s=5.0)
    slow = stats(2, verify_ms=(500.0, 9.0))
    made.published("a", slow, 3.0)
    assert {first(made, now=3.0) for _ in range(20)} == {"b"}
    made.published("a", slow, 8.5)
    assert {first(made, now=8.5) for _ in range(20)} == {"a", "b"}


def test_a_draining_replica_gets_nothing_and_nobody_else_is_left_out() -> None:
    made = router("abc")
    made.published("a", stats(2, draining=True), 1.0)
    ranks = made.choose("asked", PLAIN, list("abc"), 1.0)
    assert sorted(one for rank in ranks for one in rank) == ["b", "c"]
    assert made.choose("other", None, ["a"], 1.0) == []
    made.published("a", stats(3), 2.0)
    assert made.choose("asked", PLAIN, ["a"], 2.0) == [["a"]]


def test_a_draining_replica_is_no_random_choice_either() -> None:
    made = router("ab")
    made.published("a", stats(2, draining=True), 1.0)
    assert made.choose("asked", PLAIN, ["a", "b"], 100.0) == [["b"]]


def test_a_replica_that_is_gone_takes_its_books_along_and_its_row_is_used_again() -> None:
    made = router()
    for number in range(5):
        made.routed(str(number), PLAIN, "a", 0.5)
    made.remove("a")
    assert (made.booked, made.replicas) == (0, frozenset("b"))
    made.completed("3", "a")
    made.add("c")
    made.published("c", stats(), 1.0)
    made.routed("one", PLAIN, "b", 1.0)
    assert first(made, "bc") == "c"


def test_a_new_replica_is_taken_to_be_like_the_others() -> None:
    made = router("ab")
    made.published("a", stats(2, verify_ms=(200.0, 5.0)), 1.0)
    made.published("b", stats(2, verify_ms=(200.0, 5.0)), 1.0)
    made.add("c")
    made.routed("one", PLAIN, "a", 1.0)
    made.routed("two", PLAIN, "b", 1.0)
    assert first(made, "abc") == "c"
    for number in range(8):
        made.routed(f"new {number}", PLAIN, "c", 1.0)
    assert first(made, "abc") != "c"


def test_a_request_goes_where_its_prefix_was_read() -> None:
    made = router("abc")
    for number, replica in product((2, 3), "abc"):
        made.published(replica, stats(number, verify_ms=(20.0, 2.0)), 0.0)
    shared = list(range(1280))
    one, two, other = (describe([*shared, tail], temperature=0, max_tokens=20) for tail in (1, 2, 3))
    place = made.choose("1", one, list("abc"), 0.0)[0][0]
    made.routed("1", one, place, 0.0)
    made.completed("1", place)
    assert all(first(made, "abc", 4.0, request) == place for request in (two, other))
    fresh = describe(list(range(9000, 10280)), temperature=0, max_tokens=20)
    made.routed("busy", PLAIN, place, 4.0)
    assert first(made, "abc", 4.0, fresh) != place


def test_classes_learnt_by_any_replica_part_the_quick_from_the_slow() -> None:
    made = router("ab")
    code = describe([1] * 40, temperature=0, max_tokens=256)
    story = describe([2] * 40, temperature=0.9, max_tokens=256)
    learnt = {
        code.classes[-1]: ClassStats(40, 8000, 2000, 12_000, 9600),
        story.classes[-1]: ClassStats(40, 8000, 4000, 12_000, 800),
    }
    made.published("a", stats(2, classes=learnt), 0.5)
    for number in range(6):
        made.routed(f"code {number}", code, "a", 0.5)
        made.routed(f"story {number}", story, "b", 0.5)
    assert first(made, request=code) == "a"
    assert first(made, request=story) == "b"


def test_a_choice_that_was_never_sent_is_struck_and_one_that_is_served_is_not() -> None:
    made = router("ab")
    made.choose("lost", PLAIN, ["a", "b"], 1.0)
    made.routed("served", PLAIN, "a", 1.0)
    assert made.booked == 2
    made.published("a", stats(2), 2.0 + UNSENT_S)
    assert made.booked == 1
    made.completed("served", "a")
    assert made.booked == 0


def test_requests_that_were_cancelled_unsent_do_not_weigh_on_their_replica() -> None:
    made = router()
    for number in range(300):
        made.choose(f"cancelled {number}", PLAIN, ["b"], 1.0)
    made.routed("one", PLAIN, "a", 1.0)
    assert first(made) == "a"
    assert first(made, now=1.1 + UNSENT_S) == "b"
    assert made.booked == 1


def test_requests_that_wait_at_this_router_do_not_hide_another_router_s() -> None:
    made = router()
    for number in range(4):
        made.choose(str(number), PLAIN, ["a"], 1.0)
    made.published("a", stats(2, running=4), 1.0)
    for number in range(7):
        made.routed(f"b{number}", PLAIN, "b", 1.0)
    # Eight on a: four of another router, and four that are on their way.
    assert first(made) == "b"


@pytest.mark.parametrize("booked_at", ["a", "b", None])
def test_a_request_that_ends_before_its_replica_is_known_leaves_nothing(booked_at: str | None) -> None:
    made = router("ab")
    if booked_at:
        made.choose("quick", PLAIN, [booked_at], 1.0)
    made.completed("quick", "b")
    made.routed("quick", PLAIN, "b", 1.0)
    assert made.booked == 0
    # The same number, sent again, counts.
    made.routed("quick", PLAIN, "b", 1.0)
    assert made.booked == 1


def test_requests_that_ended_early_and_stay_unknown_are_bounded() -> None:
    made = router("ab")
    for number in range(3 * LATE):
        made.completed(str(number), "a")
    for number in range(3 * LATE):
        made.routed(str(number), PLAIN, "a", 1.0)
    assert made.booked == 2 * LATE


def test_the_end_of_an_attempt_elsewhere_leaves_the_booking() -> None:
    made = router("ab")
    made.routed("one", PLAIN, "a", 1.0)
    made.completed("one", "b")
    assert made.booked == 1


def test_the_best_three_come_in_order_and_nobody_is_left_out() -> None:
    made = router("abcdef")
    for count, replica in enumerate("abcdef"):
        for number in range(count):
            made.routed(f"{replica}{number}", PLAIN, replica, 0.5)
    assert made.choose("asked", PLAIN, list("fedcba"), 1.0) == [["a"], ["b"], ["c"], ["d", "e", "f"]]


@pytest.mark.parametrize("starved", [True, False])
def test_a_full_cache_is_a_full_batch(starved: bool) -> None:
    made = router("ab")
    made.published("a", stats(2, running=4, waiting=1, kv_use=0.99 if starved else 0.2), 1.0)
    made.published("b", stats(2, running=7, waiting=0), 1.0)
    assert first(made) == ("b" if starved else "a")
