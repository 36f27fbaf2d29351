from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsde.access.gate import Gate, admission, check_access
from dsde.access.keyring import Keyring
from dsde.access.keys import Key, new_key, write_keys
from dsde.config import DsdeConfig, LimitsConfig, from_values
from dsde.engine.refusal import RequestRefused
from tests.unit.access.conftest import NOW, Clock


class Doorway:
    """A gate over a key file, and the means to change that file."""

    def __init__(self, file: Path, clock: Clock, **limits: int) -> None:
        self._file, self._clock = file, clock
        self._keys: list[Key] = []
        write_keys(file, [])
        self.gate = Gate(Keyring(file, clock), LimitsConfig(**limits), 2, clock)  # type: ignore[arg-type]

    def add(self, **limits: int) -> str:
        key, sent = new_key("somebody", NOW, **limits)  # type: ignore[arg-type]
        self.put([*self._keys, key])
        return f"Bearer {sent}"

    def put(self, keys: list[Key]) -> None:
        self._keys = keys
        write_keys(self._file, keys)
        self._clock.now += 1.0

    def change(self, **limits: int) -> None:
        self.put([key.model_copy(update=limits) for key in self._keys])


@pytest.fixture
def doorway(file: Path, clock: Clock) -> Doorway:
    return Doorway(file, clock)


def refusal(gate: Gate, authorization: str | None, peer: str | None = "10.0.0.7") -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        gate.enter(authorization, peer)
    return refused.value


def test_a_key_is_a_bearer_token(doorway: Doorway) -> None:
    sent = doorway.add()
    for authorization in (sent, sent.replace("Bearer", "bearer"), sent.replace(" ", "  ")):
        with doorway.gate.enter(authorization, None):
            pass
    for authorization in (None, "", "Bearer", sent.removeprefix("Bearer "), sent.replace("Bearer", "Basic"), sent[:-1]):
        refused = refusal(doorway.gate, authorization)
        assert (refused.status, refused.message) == (
            401,
            "authorization: accepted is 'Bearer ' and an API key of this server",
        )


def test_requests_at_a_time_are_counted_until_they_end(doorway: Doorway) -> None:
    sent, other = doorway.add(), doorway.add(concurrency=1)
    with doorway.gate.enter(sent, None), doorway.gate.enter(sent, None):
        refused = refusal(doorway.gate, sent)
        assert refused.status == 429
        assert refused.message.endswith("it has 2 requests in progress; accepted: 2 at a time")
        # Another key has its own.
        with doorway.gate.enter(other, None):
            assert "accepted: 1 at a time" in refusal(doorway.gate, other).message
    with pytest.raises(KeyError), doorway.gate.enter(sent, None):
        raise KeyError
    with doorway.gate.enter(sent, None), doorway.gate.enter(sent, None):
        pass


def test_requests_of_a_minute_are_counted(doorway: Doorway, clock: Clock) -> None:
    sent = doorway.add(requests_per_minute=2)
    for _ in range(2):
        with doorway.gate.enter(sent, None):
            pass
    refused = refusal(doorway.gate, sent)
    assert (refused.status, refused.retry_after_s) == (429, pytest.approx(30.0))
    assert "its requests are used up; accepted: 2 requests a minute; try again in 30 s" in refused.message
    clock.now += 30.0
    with doorway.gate.enter(sent, None):
        pass
    # A refused request costs nothing.
    for _ in range(5):
        refusal(doorway.gate, sent)
    clock.now += 30.0
    with doorway.gate.enter(sent, None):
        pass


def test_tokens_of_a_minute_are_charged_to_the_task_s_request(doorway: Doorway, clock: Clock) -> None:
    sent = doorway.add(tokens_per_minute=60)
    with doorway.gate.enter(sent, None):
        admission().charge(100)
    refused = refusal(doorway.gate, sent)
    assert "its tokens are used up; accepted: 60 tokens a minute; try again in 41 s" in refused.message
    clock.now += 41.0
    with doorway.gate.enter(sent, None):
        pass


def test_the_settings_hold_for_keys_without_limits_of_their_own(file: Path, clock: Clock) -> None:
    doorway = Doorway(file, clock, requests_per_minute=1)
    usual, more = doorway.add(), doorway.add(requests_per_minute=3)
    for sent, allowed in ((usual, 1), (more, 3)):
        for _ in range(allowed):
            with doorway.gate.enter(sent, None):
                pass
        assert refusal(doorway.gate, sent).status == 429


def test_changed_limits_hold_at_once_and_keep_count_of_what_runs(doorway: Doorway) -> None:
    sent = doorway.add(concurrency=5)
    first = doorway.gate.enter(sent, None)
    doorway.change(concurrency=2)
    second = doorway.gate.enter(sent, None)
    assert refusal(doorway.gate, sent).status == 429
    for one in (first, second):
        with one:
            pass
    with doorway.gate.enter(sent, None), doorway.gate.enter(sent, None):
        assert refusal(doorway.gate, sent).status == 429


def test_accounts_do_not_outlive_their_keys(doorway: Doorway) -> None:
    for _ in range(20):
        doorway.put([])
        with doorway.gate.enter(doorway.add(), None):
            pass
    assert len(doorway.gate._accounts) == 1


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_without_keys_this_machine_is_let_in(peer: str) -> None:
    gate = Gate(None, LimitsConfig(requests_per_minute=1), 1)
    with gate.enter(None, peer), gate.enter("Bearer whatever", peer):
        admission().charge(10**9)


@pytest.mark.parametrize("peer", [None, "", "10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1", "localhost", "unix"])
def test_without_keys_no_other_machine_is_let_in(peer: str | None) -> None:
    assert refusal(Gate(None, LimitsConfig(), 1), None, peer).status == 403


def config(**sections: dict[str, Any]) -> DsdeConfig:
    return from_values(sections)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_server_is_open_only_where_that_is_said(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    check_access(config(access={"open": True}, serving={"host": host}))
    with pytest.raises(ValueError, match=r"access.keys_file is missing: `dsde keys add NAME"):
        check_access(config(serving={"host": host}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_an_open_server_is_this_machine_s_alone(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match=f"access.open = true with serving.host = {host}: accepted without keys: 127"):
        check_access(config(access={"open": True}, serving={"host": host}))
    check_access(config(access={"keys_file": "/keys.json"}, serving={"host": host}))


def test_open_and_keys_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"access.open = true and access.keys_file = /keys.json: accepted is one"):
        config(access={"open": True, "keys_file": "/keys.json"})


def test_a_key_of_vllm_s_own_is_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ValueError, match="VLLM_API_KEY is set") as error:
        check_access(config(access={"open": True}))
    assert "secret" not in str(error.value)


def test_a_key_has_as_many_requests_at_a_time_as_the_replicas_take(file: Path) -> None:
    key, sent = new_key("alice", NOW)
    write_keys(file, [key])
    small = {"replicas": 1, "max_ongoing_requests": 2}
    for limits, allowed in (({}, 2), ({"concurrency": 1}, 1)):
        gate = Gate.of(config(access={"keys_file": str(file)}, serving=small, limits=limits))
        for _ in range(allowed):
            gate.enter(f"Bearer {sent}", None)
        assert f"accepted: {allowed} at a time" in refusal(gate, f"Bearer {sent}").message
