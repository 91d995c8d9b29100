"""Forward passes without a server: a runner with the kernels that a worker would take, and batches for it."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from common.kv.pool import BlockId
from common.kv.store import KVStore
from common.model.batch import Chunk
from common.model.config import ModelConfig
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.runner import ModelRunner, kv_layout

BLOCK_SIZE = 16


class StepBench:
    """A loaded checkpoint with a cache of so many tokens.

    Args:
        capacity_tokens: of all sequences of a batch together, and of one alone.
    """

    def __init__(self, path: Path, capacity_tokens: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.config: ModelConfig = parse_config(path)
        dtype, device = torch.bfloat16, torch.device("cpu")
        loaded = load_model(path, self.config, dtype, device, progress=False, max_positions=capacity_tokens + 1)
        layout = kv_layout(self.config, BLOCK_SIZE, dtype)
        # A block of room per sequence for what is not a multiple of a block's size, and block 0, which nobody uses.
        num_blocks = 2 + 2 * (capacity_tokens // BLOCK_SIZE)
        self.runner = ModelRunner(loaded.decoder, KVStore(layout, self.config.routing, num_blocks, device))

    def decode_batch(self, num_sequences: int, context: int) -> list[Chunk]:
        """One token for each of some sequences, which have `context` tokens with it."""
        return [self._chunk(sequence, 1, context - 1) for sequence in range(num_sequences)]

    def prompt(self, num_tokens: int, chunk_tokens: int) -> list[Chunk]:
        """A prompt as an engine computes it, one chunk per step."""
        starts = range(0, num_tokens, chunk_tokens)
        return [self._chunk(0, min(chunk_tokens, num_tokens - start), start, num_tokens) for start in starts]

    def seconds(self, steps: Sequence[Sequence[Chunk]]) -> float:
        """For one step after the other."""
        begun = time.perf_counter()
        for chunks in steps:
            self.runner.execute(chunks)
        return time.perf_counter() - begun

    def _chunk(self, sequence: int, num_tokens: int, start: int, length: int = 0) -> Chunk:
        end = start + num_tokens
        per_sequence = -(-max(end, length) // BLOCK_SIZE)
        first = 1 + sequence * per_sequence
        blocks = [BlockId(block) for block in range(first, first + per_sequence)]
        token_ids = [(300 + 17 * sequence + at) % self.config.vocab_size for at in range(num_tokens)]
        return Chunk(token_ids, start, blocks, wants_logits=end >= length, wants_rows=True)
