"""Asynchronous scheduling on CPU: vLLM's CPU platform switches it off, but scheduler, engine loop and runner can do it.

What a CPU has no part of is the overlap: it computes where it is told to, so nothing is ever still under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["asynchronous_scheduling"]


@contextmanager
def asynchronous_scheduling() -> Iterator[dict[str, Any]]:
    """Engines that start in this block schedule asynchronously; yields the arguments of those that speculate."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.__dict__["check_and_update_config"]

    def checked(platform: type, vllm_config: Any) -> None:
        check.__func__(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    setattr(CpuPlatform, "check_and_update_config", classmethod(checked))  # noqa: B010 - mypy knows it as a method
    try:
        yield {"async_scheduling": True, "scheduler_cls": "dsde.engine.scheduler.DsdeAsyncScheduler"}
    finally:
        setattr(CpuPlatform, "check_and_update_config", check)  # noqa: B010
