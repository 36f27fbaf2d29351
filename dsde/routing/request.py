"""What a router knows of a request before it decodes: its size, its prefix, and the classes it belongs to."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BLOCK", "HINT", "Request", "describe", "described"]

BLOCK = 64
"""Prompt tokens in one block of a prefix."""
MAX_BLOCKS = 32
"""Blocks of a prompt that are told apart: prefixes longer than 2048 tokens count as that long."""
HEAD = 16
"""Leading tokens that tell templates and system prompts apart."""
MAX_HINT = 32
HINT = "dsde_hint"
"""Entry of SamplingParams.extra_args in which a sender names the kind of a request."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the router sees it.

    classes: names of the classes it belongs to, narrow first; each is at most 64 characters. prompt_tokens, max_tokens:
    the answer may be shorter than max_tokens, and usually is. blocks: a hash for each leading block of BLOCK tokens,
    which covers all tokens before it as well.
    """

    classes: tuple[str, ...]
    prompt_tokens: int
    max_tokens: int
    blocks: tuple[int, ...] = ()


def describe(
    token_ids: Sequence[int], *, temperature: float, max_tokens: int | None, hint: str | None = None
) -> Request:
    """Sort a request by what is known of it; the same in every process.

    hint: a name its sender gave to requests of this kind; cut to 32 characters. max_tokens: None = not limited.
    """
    length = len(token_ids)
    limit = max_tokens if max_tokens is not None else 1 << 16
    regime = "greedy" if temperature <= 0.0 else "sampled"
    sizes = f"{regime}/p{length.bit_length()}/m{limit.bit_length()}"
    head = _hash(token_ids[:HEAD], 0)
    named = (f"{hint[:MAX_HINT]}/{regime}",) if hint else ()
    blocks: list[int] = []
    before = 0
    for start in range(0, min(length - length % BLOCK, BLOCK * MAX_BLOCKS), BLOCK):
        before = _hash(token_ids[start : start + BLOCK], before)
        blocks.append(before)
    return Request((*named, f"{sizes}/{head:08x}", sizes, regime), length, limit, tuple(blocks))


def described(prompt: Mapping[str, Any], sampling_params: Any) -> Request:
    """The same of a request as it goes to an engine: vLLM's engine input and SamplingParams."""
    return describe(
        prompt.get("prompt_token_ids") or (),
        temperature=sampling_params.temperature,
        max_tokens=sampling_params.max_tokens,
        hint=(sampling_params.extra_args or {}).get(HINT),
    )


def _hash(token_ids: Sequence[int], before: int) -> int:
    return zlib.crc32(struct.pack(f"{len(token_ids)}q", *token_ids), before)
