"""Which token the target read into each KV slot, kept on the device.

In asynchronous scheduling the host hears of a sampled token only after it has launched the next steps; the device has
every token that the target ever read, and a KV slot says where it stands.
"""

from __future__ import annotations

import torch

__all__ = ["SlotTokens"]


class SlotTokens:
    """Token ids by KV slot; a slot is block id * block size + offset. Memory: 4 bytes for each token of KV cache."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def write(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """The target reads token_ids [N] into slots [N] int64, both on the device."""
        self._token_ids[slots] = token_ids.to(torch.int32)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The token ids [N] int32 of slots [N] int64; what was never written there means nothing."""
        return self._token_ids[slots]
