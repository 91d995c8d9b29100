"""What the tests of the engine's thread share: an engine, and whoever reads its events."""

import queue
from collections.abc import Callable

from common.engine.loop import Engine
from common.engine.request import EngineEvent, EngineRequest, RequestId
from common.kv.pool import BlockPool
from tests.fakes.fake_runner import FakeRunner, fake_store
from tests.unit.engine.rig import EOS, Transcript, limits

PROMPT = [5, 6, 7, 8, 9]
TIMEOUT_S = 30.0


class Consumer:
    """An engine with its runner, and the far end of its event queue."""

    def __init__(self, *, max_waiting: int = 100, num_blocks: int = 64, swap_space_bytes: int = 2**20) -> None:
        self.store = fake_store(num_blocks + 1)
        self.runner = FakeRunner(self.store)
        self.batches: queue.SimpleQueue[list[EngineEvent]] = queue.SimpleQueue()
        #: Is told of every batch, on the engine thread.
        self.on_batch: Callable[[list[EngineEvent]], object] = lambda events: None
        bounds = limits(max_waiting=max_waiting, max_num_batched_tokens=4, swap_space_bytes=swap_space_bytes)
        self.engine = Engine(self.runner, self.store, BlockPool(num_blocks + 1), bounds, EOS, self._put)
        self.transcripts: dict[RequestId, Transcript] = {}

    def _put(self, events: list[EngineEvent]) -> None:
        self.on_batch(events)
        self.batches.put(events)

    def submit(self, request: EngineRequest) -> Transcript:
        transcript = self.transcripts[request.request_id] = Transcript(request)
        self.engine.submit(request)
        return transcript

    def receive(self) -> list[EngineEvent]:
        """The next batch, booked and acknowledged."""
        events = self.batches.get(timeout=TIMEOUT_S)
        for event in events:
            self.transcripts[event.request_id].take(event)
        self.engine.events_delivered()
        return events

    def receive_until_ended(self, *transcripts: Transcript) -> None:
        while not all(t.ended for t in transcripts):
            self.receive()

    def assert_baseline(self) -> None:
        assert self.engine.check_invariants() == []  # also a barrier: every command before it has run
        self.engine.stop()
        load = self.engine.load()
        assert (load.running, load.waiting, load.handoffs, load.kv_blocks_used) == (0, 0, 0, 0)
