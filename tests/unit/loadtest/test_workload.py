from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from loadtest.plan import Manner, plan
from loadtest.sources import load
from loadtest.workload import Prompt, classes, draw, read

EVERYTHING = [one for name in classes() for one in read(name)]


def test_eight_classes_of_forty_prompts_without_a_twin() -> None:
    assert len(classes()) == 8
    for name in classes():
        assert len(read(name)) >= 40
        assert {one.workload for one in read(name)} == {name}
    texts = [one.messages[-1]["content"] for one in EVERYTHING]
    assert len(set(texts)) == len(texts)
    for one in EVERYTHING:
        roles = [message["role"] for message in one.messages if message["role"] != "system"]
        assert roles == [("user", "assistant")[number % 2] for number in range(len(roles))]
        assert roles[-1] == "user"
        assert 16 <= one.output_tokens <= 512
    assert sum(len(one.messages) > 2 for one in read("chat")) >= 8
    assert {len(re.findall(r"\w+", one.messages[0]["content"])) >= 80 for one in read("summary")[12:]} == {True}


def test_shares_hold_from_the_first_request_on() -> None:
    drawn = [one.workload for one in itertools.islice(draw(EVERYTHING, {"chat": 3, "code": 1}, 0), 80)]
    for count in (4, 8, 40, 80):
        assert Counter(drawn[:count]) == {"chat": 3 * count // 4, "code": count // 4}


def test_no_prompt_comes_twice_before_all_came_and_seeds_differ() -> None:
    def order(seed: int) -> list[Prompt]:
        return list(itertools.islice(draw(EVERYTHING, {"code": 1}, seed), 2 * len(read("code"))))

    once, again = order(1)[: len(read("code"))], order(1)[len(read("code")) :]
    assert sorted(map(str, once)) == sorted(map(str, again)) == sorted(map(str, read("code")))
    assert order(1) == [*once, *again] != order(2)


def test_every_class_takes_both_protocols_in_turn() -> None:
    requests = plan(
        draw(EVERYTHING, dict.fromkeys(classes(), 1.0), 0), [float(at) for at in range(32)], ("http", "grpc"),
        Manner(longest=24, seed=5), "load",
    )  # fmt: skip
    counts = Counter((one.prompt.workload, one.protocol) for one in requests)
    assert counts == {(name, protocol): 2 for name in classes() for protocol in ("http", "grpc")}
    # Also in a short run.
    assert Counter(one.protocol for one in requests[:8]) == {"http": 4, "grpc": 4}
    assert [one.request_id for one in requests[:2]] == ["load-0", "load-1"]
    assert max(one.prompt.output_tokens for one in requests) == 24
    # A greedy request needs no seed, a sampled one has its own.
    seeds = [one.prompt.sampling["seed"] for one in requests if one.prompt.sampling["temperature"]]
    assert len(set(seeds)) == len(seeds) > 4
    assert not any("seed" in one.prompt.sampling for one in requests if not one.prompt.sampling["temperature"])


def test_one_temperature_for_all() -> None:
    asked = Manner(temperature=0.0).of(read("chat")[0], 3)
    assert asked.sampling == {"temperature": 0.0, "top_p": 0.95}


FILES = {
    "spec.jsonl": '{"question_id": 1, "category": "writing", "turns": ["First?", "Second?"]}\n',
    "share.json": '[{"id": "a", "conversations": [{"from": "gpt", "value": "Hm"}, {"from": "human", "value": "Why?"}, '
    '{"from": "gpt", "value": "Because of that."}]}, {"id": "b", "conversations": []}]',
    "ours.jsonl": '{"class": "mine", "messages": [{"role": "user", "content": "Who?"}], "output_tokens": 7, '
    '"sampling": {"temperature": 1}}\n',
    "mooncake.jsonl": '{"timestamp": 4000, "input_length": 50, "output_length": 9, "hash_ids": [1]}\n'
    '{"timestamp": 3500, "input_length": 20, "output_length": 3, "hash_ids": []}\n',
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,20,0,20,API log\n"
    "8.5,ChatGPT,50,9,59,API log\n",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,20,3\n"
    "2023-11-16 18:15:48.1805900,50,9\n",
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_formats_are_known_by_what_is_in_them(files: Path) -> None:
    [spec] = load(files / "spec.jsonl")
    assert (spec.workload, spec.messages, spec.at_s) == ("writing", [{"role": "user", "content": "First?"}], None)
    [share] = load(files / "share.json")
    assert (share.messages[0]["content"], share.output_tokens) == ("Why?", 4)
    [ours] = load(files / "ours.jsonl")
    assert (ours.workload, ours.output_tokens, ours.sampling) == ("mine", 7, {"temperature": 1.0})


@pytest.mark.parametrize(
    ("name", "times", "lengths"),
    [("mooncake.jsonl", [0.0, 0.5], [3, 9]), ("burst.csv", [0.0, 3.5], [1, 9]), ("azure.csv", [0.0, 1.5], [3, 9])],
)
def test_traces_tell_times_and_lengths(files: Path, name: str, times: list[float], lengths: list[int]) -> None:
    first, second = load(files / name)
    assert [first.at_s, second.at_s] == pytest.approx(times, abs=1e-5)
    assert [first.output_tokens, second.output_tokens] == lengths
    assert [len(first.messages[0]["content"]), len(second.messages[0]["content"])] == [80, 200]
    assert first.messages[0]["content"] != second.messages[0]["content"][:80]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"turns": ["a"]}\n{"turns": []}\n',
            r"line 2: IndexError .*; accepted: messages with role and content, turns",
        ),
        ("hello\n", "line 1 is no JSON object; accepted: JSON Lines"),
        ('{"timestamp": 1, "input_length": 5}\n', r"line 1: output_length is missing; accepted: a time"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}\n', "input_length 0 is not from 1 to 100000"),
        ("\n", "holds no prompt"),
        ('[{"id": 1}]', "an entry without conversations"),
    ],
)
def test_a_bad_file_is_told_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(file)
