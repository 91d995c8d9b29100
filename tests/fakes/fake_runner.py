"""A model that takes microseconds and still notices every wrong block, slot, position and stale byte."""

import threading
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.kv.store import KVLayout, KVStore, slots_of
from common.model.batch import Chunk, StepOutput
from common.model.scores import score
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray, RoutingLayout

Logits = npt.NDArray[np.float32]

VOCAB_SIZE = 50
EOS_TOKEN_ID = 2
ROUTING = RoutingLayout(num_layers=2, top_k=2, num_experts=8)


def fake_store(num_blocks: int, block_size: int = 4) -> KVStore:
    """A store that fits FakeRunner; freed memory is ruined, so that stale reads change the result."""
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=block_size, dtype=torch.float32)
    return KVStore(layout, ROUTING, num_blocks, torch.device("cpu"), poison=True)


class FakeRunner:
    """Writes token and position as K and V; logits and rows are hashes of the K and V read back from position 0 on.

    Attributes:
        batches: every batch that was executed.
        forecasts: what was told, before each of them, about the next one.
        fails_on: a step with such a batch raises.
        lost_rows: positions whose rows are not written.
        nan_after: positions after which the logits are NaN.
        gate: a step waits for it; `entered` is set once it does.
        weights: which model it is; others store another K, so that every logit and row shows whose KV was read.
    """

    def __init__(self, store: KVStore, weights: int = 0) -> None:
        self._store = store
        self.weights = weights
        self.batches: list[tuple[Chunk, ...]] = []
        self.forecasts: list[tuple[Chunk, ...]] = []
        self.fails_on: Callable[[Sequence[Chunk]], bool] = lambda chunks: False
        self.lost_rows: Callable[[Chunk, int], bool] = lambda chunk, position: False
        self.nan_after: Callable[[Chunk], bool] = lambda chunk: False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        self.forecasts.append(tuple(chunks))

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        self.batches.append(tuple(chunks))
        self.entered.set()
        assert self.gate.wait(timeout=30)
        if self.fails_on(chunks):
            raise RuntimeError("the device is on fire")
        hashes = [self._forward(chunk) for chunk in chunks]
        pairs = list(zip(chunks, hashes, strict=True))
        logits_NV = [self._logits_after(chunk, values[-1]) for chunk, values in pairs if chunk.wants_logits]
        scores = tuple(_scores(chunk, values) for chunk, values in pairs if chunk.score_targets)
        return StepOutput(torch.from_numpy(np.stack(logits_NV)) if logits_NV else torch.empty(0, VOCAB_SIZE), scores)

    def _forward(self, chunk: Chunk) -> list[int]:
        """Stores KV and rows; one hash per position of the chunk."""
        slots = slots_of(chunk.blocks, 0, chunk.end, self._store.layout.block_size)
        self._store.write_kv(slots[chunk.start :], _kv_of(chunk, self.weights))
        hashes = _prefix_hashes(self._store.read_kv(slots))
        if chunk.wants_rows:
            kept = [i for i in range(chunk.start, chunk.end) if not self.lost_rows(chunk, i)]
            self._store.write_rows(slots[kept], rows_of([hashes[i] for i in kept]))
        return hashes[chunk.start :]

    def _logits_after(self, chunk: Chunk, value: int) -> Logits:
        return logits_of(value) * np.float32(np.nan) if self.nan_after(chunk) else logits_of(value)


def logits_of(value: int) -> Logits:
    """The logits [V] at a position with this hash."""
    return np.random.default_rng(value).standard_normal(VOCAB_SIZE, np.float32)


def _scores(chunk: Chunk, hashes: Sequence[int]) -> PromptLogprobs:
    rows = [logits_of(value) for value in hashes[: len(chunk.score_targets)]]
    return score(torch.from_numpy(np.stack(rows)), chunk.score_targets, chunk.num_top)


def _kv_of(chunk: Chunk, weights: int) -> torch.Tensor:
    k_T = torch.tensor(chunk.token_ids, dtype=torch.float32) + 1 + VOCAB_SIZE * weights
    v_T = torch.arange(chunk.start, chunk.end, dtype=torch.float32) + 1
    return torch.stack([k_T, v_T]).reshape(1, 2, -1, 1, 1).expand(2, -1, -1, -1, -1)


def _prefix_hashes(kv_L2TGD: torch.Tensor) -> list[int]:
    """One hash per position, of everything up to and including it."""
    hashes, value = [], 0
    for kv_L2GD in kv_L2TGD.unbind(2):
        value = zlib.crc32(kv_L2GD.contiguous().numpy().tobytes(), value)
        hashes.append(value)
    return hashes


def rows_of(hashes: Sequence[int]) -> RoutingArray:
    """Neighbouring expert ids per layer, chosen by the hash: distinct inside a row, as in a real model."""
    h_T11 = np.asarray(hashes, np.int64).reshape(-1, 1, 1)
    layer_L1 = np.arange(ROUTING.num_layers)[:, None]
    rows_TLK = ((h_T11 >> (4 * layer_L1)) + np.arange(ROUTING.top_k)) % ROUTING.num_experts
    return rows_TLK.astype(np.uint8)
