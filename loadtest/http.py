"""Requests over HTTP: streamed chat completions of the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from dsde.client.http import reason
from loadtest.exchange import End, Failure, Request

__all__ = ["HttpSender", "options_of"]

_CONNECT_TIMEOUT_S = 10.0
_MODEL_TIMEOUT_S = 30.0


class HttpSender:
    """url: the server's base, with or without /v1. Raises Failure where it is none."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        try:
            host = httpx.URL(self.base).host
        except httpx.InvalidURL as error:
            raise Failure("connection", f"--url {url}: {error}; accepted: http://HOST:PORT") from None
        # An environment's proxy has no business with loopback.
        here = host in ("127.0.0.1", "localhost", "::1")
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            # httpx would let requests above its limit wait for earlier ones, which is no open loop.
            limits=httpx.Limits(max_connections=None),
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            trust_env=not here,
        )

    async def send(self, request: Request, timeout_s: float) -> AsyncGenerator[int | End, None]:
        """See exchange.Sender."""
        headers = {"X-Request-Id": request.request_id}
        place = f"{self.base}/v1/chat/completions"
        try:
            async with self._client.stream("POST", place, json=_body(request), headers=headers) as got:
                if got.status_code != httpx.codes.OK:
                    raise Failure(f"http {got.status_code}", reason(await got.aread()))
                async for part in _parts(got):
                    yield part
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Failure("connection", f"nothing answers at {self.base}: {error or 'timed out'}") from None
        except httpx.RequestError as error:
            raise Failure("connection", f"it broke: {error or type(error).__name__}") from None

    async def model(self) -> tuple[str, str]:
        """See exchange.Sender."""
        try:
            got = await self._client.get(f"{self.base}/v1/models", timeout=_MODEL_TIMEOUT_S)
        except httpx.UnsupportedProtocol as error:
            raise Failure("connection", f"--url {self.base}: {error}; accepted: http://HOST:PORT") from None
        except httpx.TransportError as error:
            text = f"nothing answers at {self.base}: {error or 'timed out'}; start a server with `make run`"
            raise Failure("connection", text) from None
        if got.status_code != httpx.codes.OK:
            raise Failure(f"http {got.status_code}", f"{self.base}/v1/models: {reason(got.content)}")
        try:
            model = got.json()["data"][0]
            return str(model["id"]), str(model.get("root") or "")
        except (ValueError, KeyError, IndexError, TypeError):
            raise Failure("answer", f"{self.base}/v1/models lists no model") from None

    async def close(self) -> None:
        """See exchange.Sender."""
        await self._client.aclose()


def _body(request: Request) -> dict[str, Any]:
    prompt = request.prompt
    return {
        "messages": list(prompt.messages),
        "max_completion_tokens": prompt.output_tokens,
        "stream": True,
        # Without the second one cannot tell how many tokens a message brings.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **options_of(request),
    }


def options_of(request: Request) -> dict[str, Any]:
    """What a body says beside messages, length and streaming."""
    return {
        **request.prompt.sampling,
        **({"ignore_eos": True} if request.ignore_eos else {}),
        **({"vllm_xargs": {"dsde_policy": request.policy}} if request.policy else {}),
    }


async def _parts(response: httpx.Response) -> AsyncGenerator[int | End, None]:
    finish_reason, answer_id, tokens = "", "", 0
    usage: dict[str, Any] = {}
    speculation: dict[str, Any] | None = None
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            yield End(answer_id, finish_reason, usage.get("prompt_tokens"), usage.get("completion_tokens"), speculation)
            return
        try:
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise Failure("stream", str(chunk["error"]["message"]))
            answer_id = chunk["id"]
            usage = chunk.get("usage") or usage
            speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or speculation
            text = False
            for choice in chunk["choices"]:
                finish_reason = choice["finish_reason"] or finish_reason
                text = text or bool(choice["delta"].get("content"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Failure("answer", f"not a chunk of a chat completion ({error}): {line[:200]}") from None
        # A server without continuous usage is taken to send a token a message.
        counted = usage.get("completion_tokens") or 0
        new = counted - tokens if counted else int(text)
        if new > 0 and chunk["choices"]:
            tokens += new
            yield new
    raise Failure("cut", "the stream ended before its [DONE]")
