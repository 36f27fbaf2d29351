"""Lets a request in or refuses it: its key, the rate and the concurrency of that key. One gate serves HTTP and gRPC."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus
from ipaddress import ip_address
from types import TracebackType

from dsde.access.bucket import Bucket
from dsde.access.keyring import Keyring
from dsde.access.keys import Key
from dsde.config import DsdeConfig, LimitsConfig
from dsde.engine.refusal import RequestRefused

__all__ = ["Admission", "Gate", "admission", "check_access"]

_ACCEPTED = "authorization: accepted is 'Bearer ' and an API key of this server"


class _Account:
    """What one key has in use."""

    def __init__(self, key: Key, limits: LimitsConfig, concurrency: int, clock: Callable[[], float]) -> None:
        self._limits, self._concurrency, self._clock = limits, concurrency, clock
        self.running = 0
        self.allow(key)

    def allow(self, key: Key) -> None:
        """Count against the limits of `key`, in which they may have changed; the minute begins anew."""
        self.key = key
        requests = key.requests_per_minute or self._limits.requests_per_minute
        tokens = key.tokens_per_minute or self._limits.tokens_per_minute
        self.requests = Bucket(requests, self._clock) if requests else None
        self.tokens = Bucket(tokens, self._clock) if tokens else None
        self.concurrency = key.concurrency or self._concurrency

    def enter(self) -> None:
        """Count one more request. Raises RequestRefused (429)."""
        if self.running >= self.concurrency:
            self._refuse(f"it has {self.running} requests in progress", self.concurrency, "at a time", None)
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None and (wait_s := bucket.wait_s()) > 0.0:
                self._refuse(f"its {what} are used up", bucket.per_minute, f"{what} a minute", wait_s)
        if self.requests is not None:
            self.requests.take(1)
        self.running += 1

    def _refuse(self, why: str, accepted: float, unit: str, wait_s: float | None) -> None:
        wait = "" if wait_s is None else f"; try again in {math.ceil(wait_s)} s"
        raise RequestRefused(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"key {self.key.id}: {why}; accepted: {accepted:g} {unit}{wait}",
            retry_after_s=wait_s if wait_s is not None else 1.0,
        )


class Admission:
    """One request that was let in; as a context, its time in progress."""

    def __init__(self, account: _Account | None) -> None:
        self._account = account

    def charge(self, tokens: int) -> None:
        """Count tokens of prompt or answer against the key's minute."""
        if self._account is not None and self._account.tokens is not None:
            self._account.tokens.take(tokens)

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._account is not None:
            self._account.running -= 1


_admission: ContextVar[Admission | None] = ContextVar("dsde-admission", default=None)


def admission() -> Admission:
    """That of the request which this task answers."""
    return _admission.get() or Admission(None)


class Gate:
    """keyring: who may ask; None lets anyone in who asks from this machine, without limits. limits, concurrency: of a
    key that names none itself. Each ingress counts for itself.
    """

    def __init__(
        self,
        keyring: Keyring | None,
        limits: LimitsConfig,
        concurrency: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keyring, self._limits, self._concurrency, self._clock = keyring, limits, concurrency, clock
        self._accounts: dict[str, _Account] = {}

    @classmethod
    def of(cls, config: DsdeConfig) -> Gate:
        """The gate that a configuration asks for. Raises FileNotFoundError and ValueError for a bad key file."""
        keyring = None if config.access.keys_file is None else Keyring(config.access.keys_file)
        taken = config.serving.replicas * config.serving.max_ongoing_requests
        return cls(keyring, config.limits, config.limits.concurrency or taken)

    def enter(self, authorization: str | None, peer: str | None) -> Admission:
        """Let a request in, and remember it as its task's.

        authorization: the header or metadata of that name. peer: the caller's IP address. Raises RequestRefused: 401
        without a good key, 403 from another machine where there are no keys, 429 over a limit.
        """
        if self._keyring is None:
            if not _is_loopback(peer):
                raise RequestRefused(
                    HTTPStatus.FORBIDDEN, "access.open serves this machine only; set access.keys_file to serve others"
                )
            granted = Admission(None)
        else:
            account = self._account(self._keyring, authorization)
            account.enter()
            granted = Admission(account)
        _admission.set(granted)
        return granted

    def _account(self, keyring: Keyring, authorization: str | None) -> _Account:
        scheme, _, sent = (authorization or "").partition(" ")
        key = keyring.find(sent.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, _ACCEPTED)
        account = self._accounts.get(key.id)
        if account is None:
            # No more accounts than keys, but for requests of a revoked one that still run.
            self._accounts = {id_: one for id_, one in self._accounts.items() if id_ in keyring.keys or one.running}
            account = self._accounts[key.id] = _Account(key, self._limits, self._concurrency, self._clock)
        elif account.key != key:
            account.allow(key)
        return account


def _is_loopback(peer: str | None) -> bool:
    try:
        address = ip_address(peer or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_access(config: DsdeConfig) -> None:
    """Raise ValueError, with what to do, where `config` does not say who may ask, or lets other machines ask freely."""
    if os.environ.get("VLLM_API_KEY"):
        raise ValueError("VLLM_API_KEY is set: keys stand in access.keys_file, which `dsde keys` makes; unset it")
    access, host = config.access, config.serving.host
    if access.keys_file is None and not access.open:
        raise ValueError(
            "access.keys_file is missing: `dsde keys add NAME --file keys.json` makes one; access.open = true (--open) "
            "serves this machine without keys"
        )
    if access.open and host != "localhost" and not _is_loopback(host):
        raise ValueError(
            f"access.open = true with serving.host = {host}: accepted without keys: 127.0.0.1, ::1 or localhost"
        )
