"""An engine that dies is noticed, its replica is replaced, and the other one goes on answering."""

from __future__ import annotations

import time
from contextlib import suppress

import httpx
import psutil

from tests.serve.conftest import Served

REPLACED_TIMEOUT_S = 240


def engine_cores(served: Served) -> list[psutil.Process]:
    """The engines' own processes of this application."""
    found = []
    for one in psutil.Process(served.pid).children(recursive=True):
        # A process may end, or wait as a zombie, while it is asked.
        with suppress(psutil.Error):
            if "EngineCore" in "".join(one.cmdline()):
                found.append(one)
    return found


def test_a_killed_engine_is_replaced_while_the_other_serves(web: httpx.Client, served: Served) -> None:
    victim, survivor = engine_cores(served)
    victim.kill()
    body = {"model": served.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4}
    codes: list[int] = []
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while {one.pid for one in engine_cores(served)} <= {victim.pid, survivor.pid} or codes[-8:] != [200] * 8:
        assert time.monotonic() < deadline, f"not replaced within {REPLACED_TIMEOUT_S} s; answers: {codes}"
        codes.append(web.post("/v1/chat/completions", json=body).status_code)
    # What the dead engine had, or is offered before its death is known, may be refused; nothing hangs.
    assert set(codes) <= {200, 503}
    assert survivor.is_running()
    assert web.get("/health").status_code == 200


def test_a_killed_replica_takes_its_engine_along_and_is_replaced(web: httpx.Client, served: Served) -> None:
    victim, survivor = engine_cores(served)
    replica = victim.parent()
    assert replica is not None
    replica.kill()
    victim.wait(30)
    body = {"model": served.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4}
    codes: list[int] = []
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while len(engine_cores(served)) < 2 or codes[-8:] != [200] * 8:
        assert time.monotonic() < deadline, f"not replaced within {REPLACED_TIMEOUT_S} s; answers: {codes}"
        codes.append(web.post("/v1/chat/completions", json=body).status_code)
    assert set(codes) <= {200, 503}
    assert survivor.is_running()
