"""The ingress: vLLM's OpenAI application and the gRPC service, carried to the replicas over a Serve handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.util import metrics as ray_metrics

from deployments.callers import own_name
from deployments.loopback import keep_local
from deployments.rpc.service import InferenceService
from dsde.config import DsdeConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from dsde.engine.remote import GenerateCall

__all__ = ["OpenAIIngress"]

_HEALTH_TIMEOUT_S = 0.8
# In Ray's words of an actor that Serve ended: no request is to blame for that.
_STOPPED = "ray.kill"


@serve.deployment(
    max_constructor_retry_count=1,
    # It holds a stream per request and does no work of its own, so the limit that counts is the replicas'.
    max_ongoing_requests=10_000,
    graceful_shutdown_wait_loop_s=0.5,
    # What an ingress streams ends with it, so one that is replaced may finish.
    graceful_shutdown_timeout_s=600,
)
@serve.ingress()
class OpenAIIngress(InferenceService):
    """Serves the OpenAI API and the gRPC service of `config` over `engines`, a handle to EngineReplica."""

    def __init__(self, config: DsdeConfig, engines: DeploymentHandle) -> None:
        keep_local()
        self._config = config
        self._engines = engines
        self._streams = engines.options(stream=True)
        self._queued = 0
        self._name = own_name()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        from dsde.access.asgi import GateMiddleware
        from dsde.access.gate import Gate
        from dsde.access.queue import QueueBound
        from dsde.engine.disconnect import DisconnectOnCancel
        from dsde.engine.generation import TextGeneration
        from dsde.engine.openai_app import build_openai_app
        from dsde.engine.plugin import served_name
        from dsde.engine.remote import RemoteEngineClient
        from dsde.telemetry.setup import start

        replica = serve.get_replica_context().replica_id.unique_id
        start(self._config.telemetry, served_name(self._config), replica, ray_metrics)
        # A replica's own resolved configuration: what was true where the engine runs is not resolved again here.
        vllm_config = await self._engines.vllm_config.remote()
        client = RemoteEngineClient(
            vllm_config,
            self._generate,
            self._check_engines,
            max_length=self._config.speculation.max_length,
            # One replica that dies sends all of its requests to the others.
            max_retries=2 * self._config.serving.max_ongoing_requests,
            record_content=self._config.telemetry.record_content,
        )
        app = await build_openai_app(
            client, served_name(self._config), self._config.serving.tool_call_parser, self._config.limits
        )
        gate = Gate.of(self._config)
        app.add_middleware(QueueBound, is_full=self._is_full)
        # The last one added is asked first: who has no key is not told of the queue.
        app.add_middleware(GateMiddleware, gate=gate)
        # Serve cancels what a client has left.
        app.add_middleware(DisconnectOnCancel)
        self.offer(TextGeneration(client, app.state), gate, self._config.speculation.max_length, self._is_full)
        return app

    def _is_full(self) -> bool:
        # Serve counts a request some steps after it has let it in, which a burst gets past.
        return self._queued >= self._config.serving.max_queued_requests

    async def _generate(self, call: GenerateCall) -> AsyncGenerator[Any, None]:
        from dsde.access.queue import FULL
        from dsde.engine.call import EngineDied, EnginesFull, EngineUnavailable

        if self._is_full():
            raise EnginesFull(FULL)
        response = None
        finished = False
        try:
            response = self._streams.generate.remote(call, self._name)
            self._queued += 1
            try:
                # Until a replica takes it.
                await response._to_object_ref_gen()
            finally:
                self._queued -= 1
            async for output in response:
                yield output
            finished = True
        except RayTaskError as error:
            finished = True
            raise error.cause from None
        except RayError as error:
            finished = True
            if _STOPPED in str(error):
                raise EngineUnavailable("the engine replica of this request was stopped; send it again") from error
            raise EngineDied("the engine replica of this request went away; send it again") from error
        except DeploymentUnavailableError as error:
            finished = True
            raise EngineUnavailable("there is no engine replica; send the request again later") from error
        except BackPressureError as error:
            # Cancelling what was never assigned would raise this error once more.
            finished = True
            raise EnginesFull(FULL) from error
        finally:
            # Neither a dropped generator nor a cancelled task stops the replica's side; this does.
            if response is not None and not finished:
                response.cancel()

    async def _check_engines(self) -> None:
        from dsde.engine.remote import EngineUnavailable

        try:
            asked = self._engines.broadcast("healthy")
            answers = await asyncio.wait_for(asked.results_async(return_exceptions=True), _HEALTH_TIMEOUT_S)
        except TimeoutError:
            # A replica that has all the requests it takes lets this one wait too: full is not dead. Those that are
            # dead say so at once, or are taken off the list by Serve.
            return
        except DeploymentUnavailableError as error:
            raise EngineUnavailable("there is no engine replica") from error
        if True not in answers:
            raise EngineUnavailable(f"none of {len(answers)} engine replicas is healthy")
