"""A finished request's figures on their way into its answer, as `metrics.speculative_decoding.dsde`.

The scheduler hands them to vLLM as RequestOutput.kv_transfer_params, the one dictionary that vLLM carries from a
scheduler to its client unread; they leave that place here, so an answer never shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from dsde.engine.transport import EVENTS_KEY, FIGURES_KEY

__all__ = ["FiguredSpecDecodeMetrics", "attach_figures"]


@dataclass
class FiguredSpecDecodeMetrics(RequestSpecDecodeMetrics):
    """vLLM's per-request speculation metrics with ours beside them."""

    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """vLLM's fields, unchanged, and `dsde`."""
        return {**super().to_dict(), FIGURES_KEY: dict(self.figures)}


def attach_figures(output: RequestOutput, num_spec_tokens: int) -> None:
    """Move the figures an output carries into its speculation metrics, in place; without figures, leave it alone.

    `num_spec_tokens` sizes vLLM's acceptance histogram for a request that never reached a verification step.
    """
    carried = output.kv_transfer_params
    if not carried or FIGURES_KEY not in carried:
        return
    others = {key: value for key, value in carried.items() if key not in (FIGURES_KEY, EVENTS_KEY)}
    output.kv_transfer_params = others or None
    if not output.outputs:
        return
    completion = output.outputs[0]
    measured = completion.spec_decode_metrics or RequestSpecDecodeMetrics.new(num_spec_tokens)
    completion.spec_decode_metrics = FiguredSpecDecodeMetrics(**vars(measured), figures=carried[FIGURES_KEY])
