"""A loaded synthetic checkpoint with its own store, and access to the logits of every position."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore, slots_of
from common.model.batch import Chunk
from common.model.decoder import MoeDecoder
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.plan import plan_forward
from common.model.runner import ModelRunner
from common.model.synthesize import synthesize
from common.routing.record import RoutingArray

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def make_checkpoint(path: Path, family: str, overrides: Mapping[str, Any], *, seed: int = 0) -> Path:
    synthesize(family, "tiny", seed, overrides, path)
    return path


def load_decoder(path: Path, dtype: torch.dtype = torch.float32) -> MoeDecoder:
    return load_model(path, parse_config(path), dtype, CPU, progress=False).decoder


def chunk(tokens: Sequence[int], start: int, blocks: Sequence[BlockId], *, wants_rows: bool = True) -> Chunk:
    return Chunk(tokens, start, blocks, wants_logits=True, wants_rows=wants_rows)


class Harness:
    """One decoder and one poisoned store; hands out blocks in an order of its own, so that none are consecutive."""

    def __init__(self, decoder: MoeDecoder, *, num_blocks: int = 128, seed: int = 0) -> None:
        self.decoder = decoder
        config = decoder.config
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, decoder.dtype)
        self.store = KVStore(layout, config.routing, num_blocks, CPU, poison=True)
        self.runner = ModelRunner(decoder, self.store)
        self._free = [BlockId(b) for b in 1 + np.random.default_rng(seed).permutation(num_blocks - 1)]

    def blocks_for(self, num_tokens: int) -> list[BlockId]:
        """Blank blocks that nobody else has."""
        blocks = [self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        self.store.clear_blocks(blocks)
        return blocks

    @torch.inference_mode()
    def all_logits(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Logits [len(chunk), V] of every position of every chunk; also runs the batch through the runner itself.

        Asserts that the runner's logits are those of the chunks' last positions.
        """
        last = self.runner.execute(chunks)
        plan = plan_forward(chunks, self.decoder.config, self.store)
        hidden = self.decoder.forward(plan, self.store.kv_L2SGD, None)
        order = sorted(chunks, key=lambda c: (len(c.token_ids) > 1, -c.end))
        sizes = [len(c.token_ids) for c in order]
        parts = dict(zip(map(id, order), torch.split(self.decoder.logits(hidden), sizes), strict=True))
        logits = [parts[id(c)] for c in chunks]
        torch.testing.assert_close(last, torch.stack([part[-1] for part in logits]), rtol=0, atol=0)
        return logits

    def rows(self, blocks: Sequence[BlockId], num_tokens: int) -> RoutingArray:
        return self.store.read_rows(slots_of(blocks, 0, num_tokens, BLOCK_SIZE))

    def kv(self, blocks: Sequence[BlockId], num_tokens: int) -> torch.Tensor:
        return self.store.read_kv(slots_of(blocks, 0, num_tokens, BLOCK_SIZE))


def solo_run(decoder: MoeDecoder, tokens: Sequence[int]) -> tuple[torch.Tensor, RoutingArray, torch.Tensor]:
    """Logits, rows and KV of a sequence that is computed alone, in one chunk."""
    harness = Harness(decoder)
    blocks = harness.blocks_for(len(tokens))
    (logits,) = harness.all_logits([chunk(tokens, 0, blocks)])
    return logits, harness.rows(blocks, len(tokens)), harness.kv(blocks, len(tokens))
