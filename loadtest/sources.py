"""Prompts from files that people have: our own lines, Spec-Bench, ShareGPT, and request traces with timestamps."""

from __future__ import annotations

import csv
import datetime
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from loadtest.workload import Prompt, classes, prompt, read

__all__ = ["load"]

OUTPUT_TOKENS = 128
"""Limit of an answer whose length the file does not tell."""
CHARACTERS_PER_TOKEN = 4
LONGEST_INPUT = 100_000
# Azure's LLM inference trace, BurstGPT, Mooncake.
_TIME = ("TIMESTAMP", "Timestamp", "timestamp")
_INPUT = ("ContextTokens", "Request tokens", "input_length")
_OUTPUT = ("GeneratedTokens", "Response tokens", "output_length")


def load(file: Path, most: int = 100_000) -> list[Prompt]:
    """The first `most` prompts of `file`, whose format is told by what is in it.

    JSON Lines with `messages`: as loadtest/workloads; with `turns`: Spec-Bench, of which the first turn is asked; with
    `timestamp`: a trace, in ms, as Mooncake's. A JSON list of `conversations`: ShareGPT, of which the first question is
    asked, its answer telling the length. CSV: a trace, in seconds or dates, as BurstGPT's and Azure's. A trace tells
    lengths; its prompts are filled with text of ours, at four characters a token.

    Raises ValueError naming the file, the line and what is accepted.
    """
    if not file.is_file():
        raise ValueError(f"--input {file}: there is no such file")
    if file.suffix == ".csv":
        with file.open(newline="") as rows:
            return _trace(file, itertools.islice(csv.DictReader(rows), most), second=1.0)
    text = file.read_text()
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--input {file} is not JSON: {error}") from None
        return _some(file, [one for entry in entries[:most] if (one := _sharegpt(file, entry)) is not None])
    lines = list(itertools.islice(_lines(file, text), most))
    if lines and "timestamp" in lines[0]:
        return _trace(file, lines, second=1000.0)
    return _some(file, [_line(file, number, line) for number, line in enumerate(lines, start=1)])


def _some(file: Path, prompts: list[Prompt]) -> list[Prompt]:
    if not prompts:
        raise ValueError(f"--input {file} holds no prompt")
    return prompts


def _lines(file: Path, text: str) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            parsed = json.loads(line)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise ValueError(f"--input {file}, line {number} is no JSON object; accepted: JSON Lines")
        yield parsed


def _line(file: Path, number: int, line: dict[str, Any]) -> Prompt:
    try:
        if "turns" in line:
            message = {"role": "user", "content": str(line["turns"][0])}
            return Prompt(str(line.get("category", "spec-bench")), [message], OUTPUT_TOKENS)
        return prompt({"class": file.stem, "output_tokens": OUTPUT_TOKENS, **line})
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"--input {file}, line {number}: {type(error).__name__} {error}; accepted: messages with role and content, "
            "turns, or timestamp with input_length and output_length"
        ) from None


def _sharegpt(file: Path, entry: Any) -> Prompt | None:
    try:
        turns = [(str(turn["from"]), str(turn["value"])) for turn in entry["conversations"]]
    except (KeyError, TypeError):
        raise ValueError(f"--input {file}: an entry without conversations of from and value is no ShareGPT") from None
    for (asker, question), (answerer, answer) in itertools.pairwise(turns):
        if asker in ("human", "user") and answerer in ("gpt", "assistant") and question.strip() and answer.strip():
            length = max(1, len(answer) // CHARACTERS_PER_TOKEN)
            return Prompt("sharegpt", [{"role": "user", "content": question}], length)
    return None


def _trace(file: Path, rows: Iterable[Mapping[str, Any]], second: float) -> list[Prompt]:
    found: list[Prompt] = []
    # CSV has its names on line 1.
    for number, row in enumerate(rows, start=2 if file.suffix == ".csv" else 1):
        try:
            at_s = _seconds(_value(row, _TIME), second)
            length = max(1, int(float(_value(row, _OUTPUT))))
            if "messages" in row:
                asked = prompt({"class": "trace", "output_tokens": length, **row})
            else:
                tokens = int(float(_value(row, _INPUT)))
                message = {"role": "user", "content": _filled(tokens, number)}
                asked = Prompt("trace", [message], length)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--input {file}, line {number}: {error}; accepted: a time ({', '.join(_TIME)}), the prompt's tokens "
                f"({', '.join(_INPUT)}) and the answer's ({', '.join(_OUTPUT)})"
            ) from None
        found.append(replace(asked, at_s=at_s))
    first = min((one.at_s or 0.0 for one in found), default=0.0)
    moved = [replace(one, at_s=(one.at_s or 0.0) - first) for one in found]
    return sorted(_some(file, moved), key=lambda one: one.at_s or 0.0)


def _value(row: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if row.get(name) not in (None, ""):
            return str(row[name])
    raise ValueError(f"{names[-1]} is missing")


def _seconds(text: str, second: float) -> float:
    try:
        return float(text) / second
    except ValueError:
        # Azure writes seven digits of a second, Python reads six.
        head, dot, fraction = text.partition(".")
        date = datetime.datetime.fromisoformat(f"{head}{dot}{fraction[:6].ljust(6, '0')}" if dot else head)
        return date.replace(tzinfo=datetime.UTC).timestamp()


@cache
def _texts() -> list[str]:
    return [one.messages[-1]["content"] for name in classes() for one in read(name)]


def _filled(tokens: int, number: int) -> str:
    """About `tokens` tokens of our own prompts, from another place for each number."""
    if not 0 < tokens <= LONGEST_INPUT:
        raise ValueError(f"input_length {tokens} is not from 1 to {LONGEST_INPUT}")
    texts = _texts()
    pieces: list[str] = []
    characters = 0
    for text in itertools.islice(itertools.cycle(texts), number * 7 % len(texts), None):
        pieces.append(text)
        characters += len(text) + 1
        if characters >= tokens * CHARACTERS_PER_TOKEN:
            break
    return " ".join(pieces)[: tokens * CHARACTERS_PER_TOKEN]
