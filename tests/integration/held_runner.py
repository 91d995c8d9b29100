"""A model whose steps a test can stop, to let something happen in the middle of a request."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from common.kv.store import KVStore
from common.model.batch import Chunk, Runner, StepOutput
from common.model.decoder import MoeDecoder
from common.model.runner import ModelRunner
from tests.integration.kit import Kit


class HeldRunner(ModelRunner):
    """Computes as many steps as it is allowed to; the next one waits."""

    def __init__(self, decoder: MoeDecoder, store: KVStore) -> None:
        super().__init__(decoder, store)
        self.num_steps = 0
        self._limit: int | None = None
        self._held = False
        self._changed = threading.Condition()

    def hold_after(self, num_steps: int | None) -> None:
        """Lets so many steps pass in all; None: every step."""
        with self._changed:
            self._limit = num_steps
            self._changed.notify_all()

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        with self._changed:
            self._held = not self._allowed()
            self._changed.notify_all()
            assert self._changed.wait_for(self._allowed, timeout=30)
            self._held = False
            self.num_steps += 1
        return super().execute(chunks)

    def _allowed(self) -> bool:
        return self._limit is None or self.num_steps < self._limit

    def wait_held(self) -> None:
        """Blocks until a step waits."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held, timeout=30)

    def wait_held_after(self, num_steps: int) -> None:
        """Blocks until so many steps have passed in all, and another one waits."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held and self.num_steps == num_steps, timeout=30)


def held(kit: Kit) -> Kit:
    """The kit of a checkpoint, with runners that can be held."""

    def make_runner(store: KVStore) -> Runner:
        made = kit.make_runner(store)
        assert isinstance(made, ModelRunner)
        return HeldRunner(made.decoder, store)

    return replace(kit, make_runner=make_runner)
