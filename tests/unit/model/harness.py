"""A loaded synthetic checkpoint with its own store, and access to the logits of every position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.kv.pool import BlockId
from common.kv.store import KVStore, slots_of
from common.model.batch import Chunk
from common.model.decoder import MoeDecoder
from common.model.families import parse_config
from common.model.kernels.choice import choose_kernels
from common.model.loader import load_model
from common.model.plan import plan_forward
from common.model.runner import ModelRunner, kv_layout
from common.model.synthesize import synthesize
from common.routing.record import RoutingArray

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def make_checkpoint(path: Path, family: str, overrides: Mapping[str, Any], *, seed: int = 0) -> Path:
    synthesize(family, "tiny", seed, overrides, path)
    return path


def load_decoder(path: Path, dtype: torch.dtype = torch.float32, kernels: str = "auto") -> MoeDecoder:
    config = parse_config(path)
    chosen = choose_kernels(kernels, CPU, config)
    return load_model(path, config, dtype, CPU, progress=False, kernels=chosen).decoder


def chunk(tokens: Sequence[int], start: int, blocks: Sequence[BlockId], *, wants_rows: bool = True) -> Chunk:
    return Chunk(tokens, start, blocks, wants_logits=True, wants_rows=wants_rows)


class Harness:
    """One decoder and one poisoned store; hands out blocks in an order of its own, so that none are consecutive."""

    def __init__(self, decoder: MoeDecoder, *, num_blocks: int = 128, seed: int = 0) -> None:
        self.decoder = decoder
        config = decoder.config
        layout = kv_layout(config, BLOCK_SIZE, decoder.dtype)
        self.store = KVStore(layout, config.routing, num_blocks, CPU, poison=True)
        self.runner = ModelRunner(decoder, self.store)
        self._free = [BlockId(b) for b in 1 + np.random.default_rng(seed).permutation(num_blocks - 1)]

    def blocks_for(self, num_tokens: int) -> list[BlockId]:
        """Blank blocks that nobody else has."""
        blocks = [self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        self.store.clear_blocks(blocks)
        return blocks

    @torch.inference_mode()
    def all_logits(self, tokens: Sequence[int], start: int, blocks: Sequence[BlockId]) -> torch.Tensor:
        """Logits [len(tokens), V] of every position of one chunk; stores KV and rows as the runner does."""
        self.runner.execute([chunk(tokens, start, blocks)])
        plan = plan_forward([chunk(tokens, start, blocks)], self.decoder.config, self.store, self.decoder.kernels)
        return self.decoder.logits(self.decoder.forward(plan, self.store.kv_LCSGD, None))

    def rows(self, blocks: Sequence[BlockId], num_tokens: int) -> RoutingArray:
        return self.store.read_rows(slots_of(blocks, 0, num_tokens, BLOCK_SIZE))

    def kv(self, blocks: Sequence[BlockId], num_tokens: int) -> torch.Tensor:
        return self.store.read_kv(slots_of(blocks, 0, num_tokens, BLOCK_SIZE))


@dataclass(frozen=True, slots=True)
class SoloRun:
    """What a sequence computed alone, in one chunk, gives: logits [T, V], rows [T, L, K], KV [L, 2, T, G, D]."""

    logits: torch.Tensor
    rows: RoutingArray
    kv: torch.Tensor


def solo_run(decoder: MoeDecoder, tokens: Sequence[int]) -> SoloRun:
    harness = Harness(decoder)
    blocks = harness.blocks_for(len(tokens))
    logits = harness.all_logits(tokens, 0, blocks)
    return SoloRun(logits, harness.rows(blocks, len(tokens)), harness.kv(blocks, len(tokens)))
