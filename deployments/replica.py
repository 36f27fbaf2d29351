"""The engine replica: one vLLM engine, its health, and its policy, which switches while it serves."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.util import metrics as ray_metrics

from deployments.autoscaling import signals
from deployments.callers import Callers
from deployments.loopback import keep_local
from dsde.config import DsdeConfig
from dsde.control.policies import build_policy

if TYPE_CHECKING:
    from dsde.engine.remote import GenerateCall

__all__ = ["EngineReplica"]

logger = logging.getLogger("ray.serve")


# Two replicas that fail, or one twice: what cannot work is told at once, not after Serve's twenty tries.
@serve.deployment(
    max_constructor_retry_count=2,
    health_check_period_s=2,
    health_check_timeout_s=30,
    graceful_shutdown_wait_loop_s=0.5,
    graceful_shutdown_timeout_s=5,
)
class EngineReplica:
    """Hosts the engine of `config`.

    user_config: {"policy": name, "settings": {...}}; a new value switches the policy of running replicas in place, and
    a restarted replica comes up with it.
    """

    def __init__(self, config: DsdeConfig) -> None:
        # Imported here: the process that only builds the application needs no vLLM.
        from dsde.engine.local import LocalEngine
        from dsde.engine.plugin import served_name
        from dsde.telemetry.setup import start

        keep_local()
        self._config = config
        self._policy = (config.speculation.policy, dict(config.speculation.settings))
        self._taken = 0
        self._callers = Callers()
        replica = serve.get_replica_context().replica_id.unique_id
        telemetry = start(config.telemetry, served_name(config), replica, ray_metrics)
        self._engine = LocalEngine.start(config, replica, telemetry)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Switch the policy; Serve calls this once at the start and at every change of user_config.

        A bad value is logged and changes nothing: Serve would replace a replica that raises, and again with the same
        value, until none is left.
        """
        await self._engine.ready(self._config.engine.step_timeout_s)
        try:
            policy = self._checked(user_config)
            if policy != self._policy:
                await self._engine.set_policy(*policy)
        except Exception as error:
            logger.error("policy stays %s: %s", self._policy[0], error)
        else:
            self._policy = policy

    def _checked(self, user_config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if "policy" not in user_config or set(user_config) - {"policy", "settings"}:
            raise ValueError(f"user_config {user_config!r}: accepted are policy and, if wanted, settings")
        name, settings = user_config["policy"], user_config.get("settings") or {}
        build_policy(name, settings, self._config.speculation.max_length)
        return name, settings

    async def generate(self, call: GenerateCall, caller: str = "") -> AsyncGenerator[Any, None]:
        """Stream the vLLM outputs of one request; cancelling the call aborts it in the engine.

        caller: name of the actor that waits for them; the request is aborted if that dies.
        """
        self._taken += 1
        outputs = self._engine.generate(call)
        with self._callers.waits(caller):
            try:
                async for output in outputs:
                    yield output
            finally:
                await outputs.aclose()

    async def vllm_config(self) -> Any:
        """The engine's resolved VllmConfig, from which an ingress builds its client."""
        return self._engine.vllm_config

    async def check_health(self) -> None:
        """Raise when the engine has died or is stuck; Serve then replaces this replica."""
        await self._engine.check_health()

    async def healthy(self) -> bool:
        """Whether the engine lives, as an answer rather than an error."""
        try:
            await self._engine.check_health()
        except Exception:
            return False
        return True

    def record_routing_stats(self) -> dict[str, Any]:
        """What Serve hands to the routers of this deployment, once in a period."""
        return self._engine.routing_stats().to_dict()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to the autoscaling policy, where there is one."""
        return signals(self._engine.routing_stats())

    async def load(self) -> dict[str, int]:
        """`taken`: requests since the start; `unfinished`: those the engine still has, waiting ones included."""
        return {"taken": self._taken, "unfinished": self._engine.num_unfinished_requests}

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()
