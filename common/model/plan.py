"""Everything about one batch that is the same in every layer, worked out once.

Shape suffixes: T tokens of the batch, N logits wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from common.kv.copies import SlotArray
from common.kv.store import KVStore, slots_of
from common.model.batch import Chunk
from common.model.config import ModelConfig
from common.model.kernels.interface import AttentionPlan, Kernels


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Tokens of a batch in computing order, where their K and V go, and what each attends to."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    attention: AttentionPlan
    #: Rows of the batch whose logits are wanted, in the order of the chunks as they were given.
    logits_N: torch.Tensor
    #: The batch row of each chunk's first token, in the order of the chunks as they were given.
    first_rows: list[int]
    #: Rows of the batch, and their slots, whose routing is to be stored.
    routed_tokens: SlotArray
    routed_slots: SlotArray
    #: Which chunk, as they were given, comes first, second, … in the batch.
    order: Sequence[int]

    def with_ids(self, chunks: Sequence[Chunk]) -> "ForwardPlan":
        """The same plan for chunks that differ in nothing but their ids."""
        ids_T = _joined_ids([chunks[i] for i in self.order])
        return replace(self, token_ids_T=_tensor(ids_T, self.token_ids_T.device))


def plan_forward(chunks: Sequence[Chunk], config: ModelConfig, store: KVStore, kernels: Kernels) -> ForwardPlan:
    """Puts single-token chunks first, longest sequence first, as `Kernels.plan_attention` wants them."""
    assert all(chunk.token_ids for chunk in chunks), "a chunk has no tokens"
    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].token_ids) > 1, -chunks[i].end))
    ordered = [chunks[i] for i in order]
    ends = np.cumsum([len(chunk.token_ids) for chunk in ordered])
    slots = [slots_of(chunk.blocks, chunk.start, chunk.end, store.layout.block_size) for chunk in ordered]
    tokens_of = [np.arange(end - len(chunk.token_ids), end) for chunk, end in zip(ordered, ends, strict=True)]
    routed = [i for i, chunk in enumerate(ordered) if chunk.wants_rows]
    end_row = {original: int(end) for original, end in zip(order, ends, strict=True)}
    device, num_slots = store.device, store.num_blocks * store.layout.block_size
    return ForwardPlan(
        token_ids_T=_tensor(_joined_ids(ordered), device),
        positions_T=_tensor(np.concatenate([np.arange(chunk.start, chunk.end) for chunk in ordered]), device),
        slots_T=_tensor(np.concatenate(slots), device),
        attention=kernels.plan_attention(
            ordered, config.num_heads, frozenset(config.sliding_windows), store.layout, num_slots, device
        ),
        logits_N=torch.tensor([end_row[i] - 1 for i, c in enumerate(chunks) if c.wants_logits], device=device).long(),
        first_rows=[end_row[i] - len(c.token_ids) for i, c in enumerate(chunks)],
        routed_tokens=_joined([tokens_of[i] for i in routed]),
        routed_slots=_joined([slots[i] for i in routed]),
        order=order,
    )


def _joined_ids(chunks: Sequence[Chunk]) -> SlotArray:
    return np.concatenate([np.asarray(chunk.token_ids, np.int64) for chunk in chunks])


def _joined(parts: list[SlotArray]) -> SlotArray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _tensor(values: SlotArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
