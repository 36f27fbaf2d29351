"""An engine whose process hangs while it starts is given up, with the setting that says when."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from dsde.config import from_values
from dsde.engine.local import EngineStartError, LocalEngine

pytestmark = pytest.mark.slow

BOUND_S = 60.0


def stop_first_child(seen: list[psutil.Process]) -> None:
    """It lives on, and never says that it is ready."""
    before = set(psutil.Process().children())
    deadline = time.monotonic() + BOUND_S
    while not seen and time.monotonic() < deadline:
        seen += [
            one for one in psutil.Process().children() if one not in before and "spawn_main" in "".join(one.cmdline())
        ]
        time.sleep(0.05)
    for one in seen:
        one.suspend()


def test_a_start_that_hangs_is_given_up(tiny_pair: tuple[str, str]) -> None:
    target, draft = tiny_pair
    config = from_values(
        {
            "model": {"target": target, "draft": draft, "dtype": "float32", "max_model_len": 256},
            "engine": {"kv_cache_gib": 0.1, "start_timeout_s": 10, "extra": {"skip_tokenizer_init": True}},
        }
    )
    seen: list[psutil.Process] = []
    threading.Thread(target=stop_first_child, args=(seen,)).start()
    start = time.monotonic()
    with pytest.raises(EngineStartError, match=r"engine\.start_timeout_s = 10: not ready in that time"):
        LocalEngine.start(config, "hangs")
    assert time.monotonic() - start < BOUND_S
    assert seen
    assert not any(one.is_running() for one in seen)
