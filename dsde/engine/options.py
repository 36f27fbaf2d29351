"""What one request may ask of the controller: `vllm_xargs` of an OpenAI body, SamplingParams.extra_args in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm.exceptions import VLLMValidationError

from dsde.control.policies import build_policy, policy_names
from dsde.routing.request import HINT, MAX_HINT

__all__ = ["RequestOptions", "choosable_policies", "parse"]

_PREFIX = "dsde_"
_POLICY = "dsde_policy"
_MAX_LENGTH = "dsde_max_length"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request's own choices; None leaves the engine's setting in force.

    policy: name of the policy that sets this request's speculation length.
    max_length: longest speculation length of this request in draft tokens, 0 = no speculation.

    The third option, dsde_hint, is for the router, which reads it by itself.
    """

    policy: str | None = None
    max_length: int | None = None


def parse(extra_args: Mapping[str, Any] | None, max_length: int) -> RequestOptions:
    """Read the `dsde_*` keys of `extra_args`; every other key is somebody else's and ignored.

    `max_length` is the engine's longest speculation length in draft tokens. Raises VLLMValidationError (HTTP 400)
    naming the field, the value and what is accepted.
    """
    given = {key: value for key, value in (extra_args or {}).items() if key.startswith(_PREFIX)}
    for key in given:
        if key not in (_POLICY, _MAX_LENGTH, HINT):
            raise _refusal(key, given[key], f"there is no such option; accepted: {_POLICY}, {_MAX_LENGTH}, {HINT}")
    policy = given.get(_POLICY)
    if policy is not None and policy not in (accepted := choosable_policies(max_length)):
        raise _refusal(_POLICY, policy, f"accepted: {', '.join(accepted)}")
    hint = given.get(HINT)
    if hint is not None and (not isinstance(hint, str) or not 1 <= len(hint) <= MAX_HINT):
        raise _refusal(HINT, hint, f"accepted: a name of 1 to {MAX_HINT} characters")
    length = given.get(_MAX_LENGTH)
    # bool is an int to Python, and JSON's true is no length.
    if length is not None and (type(length) is not int or not 0 <= length <= max_length):
        raise _refusal(_MAX_LENGTH, length, f"accepted: an integer from 0 to {max_length} draft tokens")
    return RequestOptions(policy=policy, max_length=length)


@cache
def choosable_policies(max_length: int) -> tuple[str, ...]:
    """The policies that can do without settings: a request names a policy, not its settings."""
    names = []
    for name in policy_names():
        with suppress(ValueError):
            build_policy(name, {}, max_length)
            names.append(name)
    return tuple(names)


def _refusal(key: str, value: Any, accepted: str) -> VLLMValidationError:
    return VLLMValidationError(f"vllm_xargs.{key} = {value!r}: {accepted}", parameter=f"vllm_xargs.{key}")
