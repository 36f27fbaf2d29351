"""The question over HTTP, to /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from dsde.client.exchange import Answer, ClientError, Question

__all__ = ["ask_http", "reason"]

_CONNECT_TIMEOUT_S = 5.0


async def ask_http(
    question: Question, url: str, api_key: str | None, stream: bool
) -> AsyncGenerator[str | Answer, None]:
    """See exchange.Ask. url: the server's base, with or without /v1."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # An environment's proxy has no business with loopback.
        here = httpx.URL(base).host in ("127.0.0.1", "localhost", "::1")
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=not here) as client,
            client.stream("POST", f"{base}/v1/chat/completions", json=_body(question, stream), headers=headers) as got,
        ):
            if got.status_code != httpx.codes.OK:
                raise ClientError(f"{base} answers {got.status_code}: {reason(await got.aread())}")
            if stream:
                async for part in _streamed(got):
                    yield part
            else:
                answer = json.loads(await got.aread())
                (choice,) = answer["choices"]
                yield choice["message"]["content"] or ""
                yield _answer(answer, choice["finish_reason"])
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ClientError(
            f"nothing answers at {base}: {error or 'timed out'}; start a server with `make run`"
        ) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ClientError(f"--url {url}: {error}; accepted: http://HOST:PORT") from None
    except httpx.TransportError as error:
        raise ClientError(f"the connection to {base} broke: {error or type(error).__name__}") from None


def _body(question: Question, stream: bool) -> dict[str, Any]:
    given = {
        "max_completion_tokens": question.max_tokens,
        "temperature": question.temperature,
        "vllm_xargs": None if question.policy is None else {"dsde_policy": question.policy},
        "stream_options": {"include_usage": True} if stream else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return {"messages": question.messages, "stream": stream, **given}


async def _streamed(response: httpx.Response) -> AsyncGenerator[str | Answer, None]:
    finish_reason = ""
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise ClientError(f"the server ended the answer: {chunk['error']['message']}")
        for choice in chunk["choices"]:
            finish_reason = choice["finish_reason"] or finish_reason
            yield choice["delta"].get("content") or ""
        if chunk.get("usage"):
            yield _answer(chunk, finish_reason)


def _answer(body: dict[str, Any], finish_reason: str) -> Answer:
    return Answer(
        request_id=body["id"],
        model=body["model"],
        finish_reason=finish_reason,
        prompt_tokens=body["usage"]["prompt_tokens"],
        completion_tokens=body["usage"]["completion_tokens"],
        speculation=(body.get("metrics") or {}).get("speculative_decoding"),
    )


def reason(body: bytes) -> str:
    """What a refusal's body says: the error's message where it is OpenAI's, else its beginning."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200] or "without a reason"
