from __future__ import annotations

import hashlib
import json

from dsde.bench.workload import MANNERS, Question, classes, questions, workload_names


def text(chosen: list[Question]) -> list[str]:
    return [chat[-1]["content"] for _, chat in chosen]


def test_eight_classes_of_twelve() -> None:
    assert classes() == ("abstract", "chat", "code", "facts", "math", "reasoning", "summary", "translation")
    assert workload_names() == ("mix", *classes())
    for name in classes():
        assert questions(name, 0, 13)[12].chat[0]["content"].startswith(questions(name, 0, 1)[0].chat[0]["content"])


def test_the_questions_are_those_of_every_measurement_so_far() -> None:
    everything = json.dumps([chat for name in classes() for _, chat in questions(name, 0, 12)])
    assert (
        hashlib.sha256(everything.encode()).hexdigest()
        == "897f8aefaab0f22769c42fbba4d249c587acdd67177bee9e3a617c166280e695"
    )


def test_the_mix_takes_the_classes_in_turn() -> None:
    first = text(questions("mix", 0, 9))
    assert [one.workload for one in questions("mix", 0, 8)] == list(classes())
    assert first[:8] == [text(questions(name, 0, 1))[0] for name in classes()]
    assert first[8] == text(questions(classes()[0], 1, 1))[0]


def test_no_two_requests_of_a_batch_are_alike() -> None:
    for name in workload_names():
        assert len(set(text(questions(name, 5, 12 * len(MANNERS))))) == 12 * len(MANNERS)
    code = text(questions("code", 0, 13))
    assert code[12] == f"{code[0]} {MANNERS[1]}"


def test_the_list_is_endless_and_leaves_its_questions_alone() -> None:
    assert questions("code", 12 * len(MANNERS), 3) == questions("code", 0, 3)
