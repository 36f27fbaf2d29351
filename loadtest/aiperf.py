"""The same traffic for NVIDIA's AIPerf, over HTTP: its dataset file and its command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.exchange import Request
from loadtest.http import options_of

__all__ = ["DATASET", "command", "write_dataset"]

DATASET = "aiperf.jsonl"


def write_dataset(directory: Path, requests: Sequence[Request]) -> Path:
    """Write `requests` into `directory` as lines of AIPerf's mooncake_trace format; the file.

    It is the format that takes whole conversations, arrival times in ms and sampling parameters of each request.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / DATASET
    file.write_text("".join(f"{json.dumps(_line(one))}\n" for one in requests))
    return file


def _line(request: Request) -> dict[str, Any]:
    return {
        "timestamp": round(request.at_s * 1000),
        "messages": list(request.prompt.messages),
        "output_length": request.prompt.output_tokens,
        "extra": options_of(request),
    }


def command(dataset: Path, model: str, tokenizer: str, url: str, count: int) -> str:
    """The command line, for AIPerf 0.13. tokenizer: a directory or a name; empty: AIPerf takes the model's name."""
    words = ["aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", tokenizer] if tokenizer else []
    words += ["--input-file", str(dataset), "--custom-dataset-type", "mooncake_trace"]
    # Its own count would miss what the chat template adds.
    words += ["--use-server-token-count", "--fixed-schedule", "--request-count", str(count), "--ui", "simple"]
    return shlex.join(words)
