"""What takes part: the engine without a drafter, fixed lengths and the controller's policies, by their names.

autoregressive                 an engine without a drafter; always takes part, as the baseline
static                         every fixed length of LENGTHS
static-K                       the fixed length K, 0 to LONGEST; static-0 is the drafter's engine, told not to draft
NAME                           a policy of the controller with its default settings
NAME:SETTING=VALUE[:...]       the same with settings, values in YAML
batch_schedule                 without a table of its own it gets the fixed lengths that were best so far
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dsde.control.policies import build_policy, policy_names

__all__ = ["AUTOREGRESSIVE", "LENGTHS", "LONGEST", "SCHEDULE", "Contender", "contenders"]

AUTOREGRESSIVE = "autoregressive"
SCHEDULE = "batch_schedule"
LENGTHS = (1, 2, 3, 4, 6, 8, 10)
LONGEST = max(LENGTHS)
"""Longest speculation length of the engines, in draft tokens: a policy may go as far as a fixed length does."""

_FIXED = re.compile(r"static-(\d+)")


@dataclass(frozen=True, slots=True)
class Contender:
    """One line of the benchmark. policy: None for the engine without a drafter."""

    label: str
    policy: str | None
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def length(self) -> int | None:
        """K of a fixed length above 0, None for all others."""
        match = _FIXED.fullmatch(self.label)
        return int(match[1]) or None if match else None

    @property
    def learns(self) -> bool:
        """Whether its first run of a cell is a beginner's."""
        if self.policy is None or (self.policy == SCHEDULE and not self.settings):
            return False
        return build_policy(self.policy, self.settings, LONGEST).learns


def contenders(names: Sequence[str] | None = None) -> list[Contender]:
    """The contenders of these names, the baseline first and fixed lengths, ascending, before the rest.

    None: everything there is. ValueError names the one that is not known, or the setting that its policy refuses.
    """
    if names is None:
        names = ("static", *(name for name in policy_names() if name not in (AUTOREGRESSIVE, "static")))
    chosen = [contender for name in names if name != AUTOREGRESSIVE for contender in _named(name)]
    distinct = list(dict.fromkeys(chosen))
    distinct.sort(key=lambda contender: (contender.length is None, contender.length or 0))
    return [Contender(AUTOREGRESSIVE, None), *distinct]


def _named(text: str) -> list[Contender]:
    if text == "static":
        return [_fixed(length) for length in LENGTHS]
    if match := _FIXED.fullmatch(text):
        if int(match[1]) > LONGEST:
            raise ValueError(f"--policies {text!r}: accepted: static-0 to static-{LONGEST}")
        return [_fixed(int(match[1]))]
    name, *assignments = text.split(":")
    if name not in policy_names():
        accepted = ", ".join((AUTOREGRESSIVE, "static", "static-K", *(n for n in policy_names() if n != "static")))
        raise ValueError(f"--policies {text!r} is unknown; accepted: {accepted}, and settings as in static:length=2")
    settings: dict[str, Any] = {}
    for assignment in assignments:
        setting, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--policies {text!r}: {assignment!r} is no setting; accepted: NAME:SETTING=VALUE")
        try:
            settings[setting] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--policies {text!r}: {value!r} is not YAML") from error
    if name != SCHEDULE or settings:
        build_policy(name, settings, LONGEST)
    return [Contender(text, name, settings)]


def _fixed(length: int) -> Contender:
    return Contender(f"static-{length}", "static", {"length": length})
