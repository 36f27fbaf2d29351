"""vLLM's own OpenAI application over any EngineClient: chat templates, tools, logprobs, structured output, SSE.

Nothing of the API is ours but the header `x-dsde-hint` and how a refusal is told; what is decided here is which of
vLLM's switches are on.
"""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dsde.config import LimitsConfig
from dsde.engine.checks import check_rendering
from dsde.engine.early_status import EarlyStatus
from dsde.engine.hint import HintHeader

__all__ = ["build_openai_app"]

_OFFERED = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"),
    *("/tokenize", "/detokenize", "/health", "/ping", "/openapi.json"),
}
"""Without vLLM's others: they abort anyone's requests, rescale its engines or take token ids past the checks."""


async def build_openai_app(
    client: EngineClient, served_name: str, tool_call_parser: str | None, limits: LimitsConfig
) -> FastAPI:
    """The application, ready to serve the model under `served_name`, to requests within `limits`.

    tool_call_parser: vLLM's name of the form in which the model writes tool calls; None refuses requests with tools.
    """
    tasks = await client.get_supported_tasks()
    arguments = _arguments(client.model_config.model, served_name, tool_call_parser)
    app = build_app(arguments, tasks, client.model_config)
    await init_app_state(client, app.state, arguments, tasks)
    check_rendering(app.state, client, limits)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _OFFERED]
    # Starlette's own errors, such as those of an unreadable body or an unknown path, in the form of the API's.
    app.add_exception_handler(HTTPException, http_exception_handler)
    # vLLM has built it; the first request builds one that has the handler, and the middleware that is yet to come.
    app.middleware_stack = None
    # vLLM's error handler asks this server to exit when its engine has died; ours outlives its engines.
    app.state.server = SimpleNamespace()
    return app


def _arguments(model: str, served_name: str, tool_call_parser: str | None) -> Namespace:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.model = model
    arguments.served_model_name = [served_name]
    # vLLM takes no tool at all, not even a named one, without a parser.
    arguments.enable_auto_tool_choice = tool_call_parser is not None
    arguments.tool_call_parser = tool_call_parser
    arguments.middleware = [f"{one.__module__}.{one.__name__}" for one in (HintHeader, EarlyStatus)]
    arguments.enable_per_request_metrics = True
    arguments.enable_prompt_tokens_details = True
    # This switch starts a loop that logs an in-process engine's statistics; engines behind a client log their own.
    arguments.disable_log_stats = True
    return arguments
