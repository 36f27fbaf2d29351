"""What a policy is, and how its settings are read. A policy keeps no state: all it knows comes from the history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from dsde.control.history import Recent

__all__ = ["Policy", "Proposal", "Registration", "Signals", "build", "check_number", "choices"]


@dataclass(frozen=True, slots=True)
class Signals:
    """Stability signals of B requests: scale_factor [B] and wvir [B], both float64."""

    scale_factor: Tensor
    wvir: Tensor

    @property
    def penalty(self) -> Tensor:
        """SF * WVIR, [B]; a request is stable while it is at most 1."""
        return self.scale_factor * self.wvir


@dataclass(frozen=True, slots=True)
class Proposal:
    """Speculation lengths of B requests, [B] int64 in draft tokens.

    lengths: each request's own prediction, 0 <= length <= its limit. caps: SL_cap; the request runs min(length, cap).
    """

    lengths: Tensor
    caps: Tensor


class Policy(Protocol):
    """A rule from history to speculation lengths."""

    @property
    def name(self) -> str:
        """The name under which it is registered."""

    @property
    def settings(self) -> object:
        """Its frozen settings; two policies with equal name and settings decide alike."""

    @property
    def warmup_tokens(self) -> int:
        """Verified draft tokens after which a request's calibration is over."""

    def signals(self, recent: Recent) -> Signals:
        """How stable each request is by this policy's windows and decay."""

    def propose(self, recent: Recent, limits: Tensor) -> Proposal:
        """The batch's next lengths; limits: [B] int64, the longest each request may ever have."""


@dataclass(frozen=True, slots=True)
class Registration:
    """How a policy is made: rule(settings, max_length), and the dataclass of its settings."""

    rule: Callable[[Any, int], Policy]
    settings: type


def build(registration: Registration, name: str, settings: Mapping[str, Any], max_length: int) -> Policy:
    """The registered policy with `settings`; ValueError for a setting it does not have or a value it does not take."""
    known = [field.name for field in fields(registration.settings)]
    for setting, value in settings.items():
        if setting not in known:
            accepted = f"choose {choices(known)}" if known else "it takes none"
            raise ValueError(
                f"speculation.settings.{setting} {value!r} is not a setting of policy {name!r}: {accepted}"
            )
    return registration.rule(registration.settings(**settings), max_length)


def check_number(
    field: str, value: object, low: float, high: float, *, integer: bool = False, open_low: bool = False
) -> None:
    """ValueError unless `value` is a number (an integer) from low to high; open_low leaves low itself out."""
    kinds = (int,) if integer else (int, float)
    inside = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
    if not inside or (open_low and value == low):
        noun = "an integer" if integer else "a number"
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise ValueError(f"speculation.settings.{field} {value!r} is not accepted: give {noun} {bounds}")


def choices(names: Iterable[str]) -> str:
    """The names as a sentence reads them: "a, b or c"."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
