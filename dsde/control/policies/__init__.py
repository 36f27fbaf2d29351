"""Policies: each turns the history of a batch into speculation lengths. One file per policy, registered here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsde.control.policies.adaedl import AdaEdl, AdaEdlSettings
from dsde.control.policies.autoregressive import Autoregressive, AutoregressiveSettings
from dsde.control.policies.base import Policy, Proposal, Registration, build, choices
from dsde.control.policies.batch_schedule import BatchSchedule, BatchScheduleSettings
from dsde.control.policies.goodput import Goodput, GoodputSettings
from dsde.control.policies.paper import Paper, PaperSettings
from dsde.control.policies.reference import Reference, ReferenceSettings
from dsde.control.policies.static import Static, StaticSettings

__all__ = ["DEFAULT_POLICY", "Policy", "Proposal", "build_policy", "policy_names"]

DEFAULT_POLICY = "goodput"

_REGISTRY: dict[str, Registration] = {
    "adaedl": Registration(AdaEdl, AdaEdlSettings),
    "autoregressive": Registration(Autoregressive, AutoregressiveSettings),
    "batch_schedule": Registration(BatchSchedule, BatchScheduleSettings),
    "goodput": Registration(Goodput, GoodputSettings),
    "paper": Registration(Paper, PaperSettings),
    "reference": Registration(Reference, ReferenceSettings),
    "static": Registration(Static, StaticSettings),
}


def policy_names() -> tuple[str, ...]:
    """Every policy's name, in alphabetical order."""
    return tuple(sorted(_REGISTRY))


def build_policy(name: str, settings: Mapping[str, Any], max_length: int) -> Policy:
    """The policy `name` with its settings, for lengths of at most `max_length` draft tokens.

    ValueError names the field, its value and what is accepted: an unknown policy, an unknown setting or a bad value.
    """
    if name not in _REGISTRY:
        raise ValueError(f"speculation.policy {name!r} is unknown: choose {choices(policy_names())}")
    return build(_REGISTRY[name], name, settings, max_length)
