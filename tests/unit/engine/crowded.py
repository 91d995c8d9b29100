"""What the tests of preemption share: pools that are too small, and what happens in them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.kv.copies import SlotArray
from common.kv.pool import BlockId
from common.kv.store import KVStore
from common.model.batch import Chunk, StepOutput
from tests.fakes.fake_runner import ROUTING, FakeRunner, fake_store
from tests.unit.engine.rig import (
    EOS,
    CoreRig,
    FakeRig,
    Transcript,
    greedy,
    limits,
    make_request,
    solo,
)

#: KV and row of one position of FakeRunner.
TOKEN_BYTES, ROW_BYTES = 16, 4
POSITION_BYTES = TOKEN_BYTES + ROW_BYTES
NOTHING, PLENTY = 0, 2**20


def prompt_of(length: int, first: int = 3) -> list[int]:
    return [3 + (first + 7 * i) % 40 for i in range(length)]


def rig_of(
    num_blocks: int, *, swap: int = PLENTY, block_size: int = 4, prefix_caching: bool = True, seats: int = 8
) -> FakeRig:
    bounds = limits(max_num_seqs=seats, swap_space_bytes=swap)
    return FakeRig(num_blocks=num_blocks, block_size=block_size, bounds=bounds, prefix_caching=prefix_caching)


def assert_solo(*transcripts: Transcript) -> None:
    for transcript in transcripts:
        for choice in transcript.all:
            choice.assert_equals(solo(transcript.request, choice.choice))


def run_until_preempted(rig: CoreRig, count: int = 1) -> None:
    while rig.core.stats.preemptions < count:
        assert rig.step()


def two_that_do_not_fit(rig: CoreRig, num_prompt: int = 6, **fields: object) -> tuple[Transcript, Transcript]:
    """Two requests of 5 blocks each, of which the second one has been preempted. The pool has 6 or 7 blocks."""
    first, second = (
        make_request("a", prompt_of(6, 0), greedy(14)),
        make_request("b", prompt_of(num_prompt, 1), greedy(14)),
    )
    transcripts = rig.submit(first), rig.submit(replace(second, **fields))  # type: ignore[arg-type]
    run_until_preempted(rig)
    return transcripts


class WatchedStore(KVStore):
    """Tells what happens to it outside of forward passes, and fails there.

    Attributes:
        in_step: a forward pass runs.
        failures: by method, what its next calls raise, one after the other.
        reads, writes: the slots of each call of `read_kv` and `write_kv`.
        clears: the blocks of each call of `clear_blocks`.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(fake_store(2).layout, ROUTING, num_blocks + 1, torch.device("cpu"), poison=True)
        self.in_step = False
        self.failures: dict[str, list[Exception]] = {}
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []
        self.clears: list[list[int]] = []

    def read_kv(self, slots: SlotArray) -> torch.Tensor:
        self._call("read_kv", self.reads, slots.tolist())
        return super().read_kv(slots)

    def write_kv(self, slots: SlotArray, kv_LCNGD: torch.Tensor) -> None:
        self._call("write_kv", self.writes, slots.tolist())
        super().write_kv(slots, kv_LCNGD)

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        self._call("clear_blocks", self.clears, list(blocks))
        super().clear_blocks(blocks)

    def _call(self, method: str, calls: list[list[int]], what: list[int]) -> None:
        if self.in_step:
            return
        calls.append(what)
        if failures := self.failures.get(method):
            raise failures.pop(0)


class WatchedRunner(FakeRunner):
    """Tells the store when it computes."""

    def __init__(self, store: WatchedStore) -> None:
        super().__init__(store)
        self._watched = store

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        self._watched.in_step = True
        output = super().execute(chunks)
        self._watched.in_step = False
        return output


def watched_rig(
    num_blocks: int, *, seats: int = 8, swap: int = PLENTY, exact: bool = True
) -> tuple[CoreRig, WatchedStore]:
    """A rig whose store is a WatchedStore, with `num_blocks` usable blocks."""
    store = WatchedStore(num_blocks)
    bounds = limits(max_num_seqs=seats, swap_space_bytes=swap, exact=exact)
    return CoreRig(WatchedRunner(store), store, bounds, EOS), store


def freeze(rig: CoreRig) -> int:
    """What the engine does before it stops; the number of steps that it took."""
    rig.core.close_admission()
    steps = 0
    while rig.core.has_open_prompts():
        assert rig.step()
        steps += 1
    return steps
