"""Asks, prints the answer while it comes, and its figures at the end."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dsde.client.exchange import Answer, Ask, ClientError, Question

__all__ = ["figures", "run"]


@dataclass(frozen=True, slots=True)
class _Timing:
    """Seen from here. first_text_ms: until the first text. total_ms: until the end. Speed in tokens per second."""

    first_text_ms: float
    total_ms: float
    tokens_per_second: float


def run(ask: Ask, question: Question, where: str, api_key: str | None, stream: bool, as_json: bool) -> int:
    """Ask `question` at `where` and print the answer to stdout: text and a table of figures, or one JSON object.

    Returns the exit status: 0, or 1 with a line on stderr where there is no answer. Ctrl-C cancels the request and
    raises KeyboardInterrupt.
    """
    try:
        asyncio.run(_show(ask, question, where, api_key, stream, as_json))
    except ClientError as error:
        print(f"dsde client: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndsde client: cancelled", file=sys.stderr)
        raise
    return 0


async def _show(ask: Ask, question: Question, where: str, api_key: str | None, stream: bool, as_json: bool) -> None:
    texts: list[str] = []
    answer: Answer | None = None
    start = time.monotonic()
    first: float | None = None
    async with aclosing(ask(question, where, api_key, stream)) as parts:
        async for part in parts:
            if isinstance(part, Answer):
                answer = part
                continue
            if part and first is None:
                first = time.monotonic()
            texts.append(part)
            if not as_json:
                print(part, end="", flush=True)
    end = time.monotonic()
    if answer is None:
        raise ClientError(f"the answer from {where} ended without its figures")
    timing = _Timing(
        first_text_ms=((first or end) - start) * 1000,
        total_ms=(end - start) * 1000,
        tokens_per_second=answer.completion_tokens / (end - start),
    )
    if as_json:
        print(json.dumps({"text": "".join(texts), **asdict(answer), "timing": asdict(timing)}))
        return
    print(flush=True)
    Console(stderr=not sys.stdout.isatty()).print(_table(answer, timing))


def _table(answer: Answer, timing: _Timing) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in figures(answer, timing.tokens_per_second, timing.first_text_ms):
        table.add_row(name, value)
    return table


def figures(answer: Answer, tokens_per_second: float, first_text_ms: float) -> list[tuple[str, str]]:
    """(name, value) of what a human wants to know of an answer; "-" where nothing was measured."""
    rows = [
        (
            "tokens",
            f"{answer.prompt_tokens} in, {answer.completion_tokens} out ({answer.finish_reason}), "
            f"{tokens_per_second:.1f} tok/s, first text after {first_text_ms:.0f} ms",
        )
    ]
    stats = answer.speculation
    if stats is None:
        return [*rows, ("speculation", "the server sent no figures")]
    rows.append(
        (
            "acceptance",
            f"length {stats['mean_acceptance_length']:.2f}, "
            f"{stats['num_accepted_draft_tokens']} of {stats['num_draft_tokens']} drafts",
        )
    )
    dsde = stats.get("dsde")
    if dsde is None:
        return rows
    length, kld, straggler = dsde["speculation_length"], dsde["kld"], dsde["straggler"]
    return [
        *rows,
        ("policy", f"{dsde['policy']}, {dsde['steps']} steps, {dsde['steps_off']} without drafts"),
        ("lengths", f"mean {length['mean']:.2f}, max {length['max']}, limit {length['limit']}"),
        ("KLD", f"mean {_number(kld.get('mean'))}, last {_number(kld.get('last'))} nats"),
        ("stability", _number(dsde.get("stability"))),
        ("straggler", f"waited {straggler['wait_ms']:.0f} ms, made others wait {straggler['caused_ms']:.0f} ms"),
    ]


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"
