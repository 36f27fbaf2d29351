"""A request's answer across engines: what has been sent of it, and the call that makes another engine go on.

The next engine gets the tokens as output, not as a longer prompt. It goes on as after a preemption: penalties, stop
strings, grammar, minimum and maximum lengths see one answer.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from dsde.engine.call import EngineUnavailable, GenerateCall
from dsde.engine.transport import FIGURES_KEY

__all__ = ["RESUMED", "Continuation"]

RESUMED = "resumed"
"""Figure of an answer that went on on another engine: {"times", "tokens"}, the tokens being those before the last."""


class Continuation:
    """Books one request's outputs. Tokens are kept only where they are sent one by one, so the answer bounds them."""

    def __init__(self, call: GenerateCall) -> None:
        self._call = call
        self._streams = call.sampling_params.output_kind is RequestOutputKind.DELTA
        self._emitted: list[int] = []
        self._sent = False
        self._num_cached_tokens: int | None = None
        self._times = self._tokens = 0
        self._asked: int | None = None

    @property
    def num_emitted(self) -> int:
        """Tokens that have been sent."""
        return len(self._emitted)

    def take(self, output: RequestOutput) -> None:
        """Book an output on its way to the client, and make it, in place, one of the whole answer.

        The cached part of the prompt stays what the first engine found. Figures are the last engine's, and say so.
        """
        self._sent = True
        if self._asked is not None:
            self._times += 1
            self._tokens, self._asked = self._asked, None
        if self._streams:
            for answer in output.outputs:
                self._emitted += answer.token_ids
        if not self._times:
            self._num_cached_tokens = output.num_cached_tokens
            return
        output.num_cached_tokens = self._num_cached_tokens
        carried = output.kv_transfer_params
        if carried and FIGURES_KEY in carried:
            resumed = {"times": self._times, "tokens": self._tokens}
            output.kv_transfer_params = {**carried, FIGURES_KEY: {**carried[FIGURES_KEY], RESUMED: resumed}}

    def next_call(self) -> GenerateCall:
        """The call for the next engine: the request itself while nothing has been sent, else its rest.

        Raises EngineUnavailable where the rest cannot be asked for.
        """
        if not self._sent:
            return self._call
        if not self._streams or self._call.sampling_params.n > 1:
            raise EngineUnavailable("the engine of this request died amid several answers; send it again")
        if not self._emitted:
            return self._call
        params = self._call.sampling_params.clone()
        # The client has them.
        params.prompt_logprobs = None
        if params.seed is not None:
            params.seed = _fresh_seed(params.seed, self.num_emitted)
        self._asked = self.num_emitted
        return replace(self._call, sampling_params=params, emitted=tuple(self._emitted))


def _fresh_seed(seed: int, num_emitted: int) -> int:
    """The seed for the tokens after the first `num_emitted`.

    Its own would draw the numbers again that chose the first tokens, and a sample that depends on them is none.
    """
    digest = blake2b(f"{seed}/{num_emitted}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
