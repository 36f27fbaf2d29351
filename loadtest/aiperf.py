"""The same traffic for NVIDIA's AIPerf, over HTTP: its dataset file and its command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from loadtest.exchange import Request

__all__ = ["DATASET", "command", "single_turn", "write_dataset"]

DATASET = "aiperf.jsonl"


def single_turn(requests: Sequence[Request]) -> list[Request]:
    """Those that AIPerf can send as they are: of one user message. It would let the model write the other turns."""
    return [one for one in requests if [message["role"] for message in one.prompt.messages] == ["user"]]


def write_dataset(directory: Path, requests: Sequence[Request]) -> Path:
    """Write AIPerf's single_turn lines, {"text", "output_length"}, into `directory`; the file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / DATASET
    lines = [
        json.dumps({"text": one.prompt.messages[0]["content"], "output_length": one.prompt.output_tokens})
        for one in requests
    ]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def command(
    dataset: Path, model: str, tokenizer: str, url: str, count: int, rate: float, seed: int, temperature: float
) -> str:
    """The command line, for AIPerf 0.13. tokenizer: a directory or a name; empty: AIPerf takes the model's name."""
    words = ["aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", tokenizer] if tokenizer else []
    words += ["--input-file", str(dataset), "--custom-dataset-type", "single_turn"]
    words += ["--request-count", str(count), "--request-rate", f"{rate:g}", "--random-seed", str(seed)]
    words += ["--ui", "simple", "--extra-inputs", f"temperature:{temperature:g}"]
    return shlex.join(words)
