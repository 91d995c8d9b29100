"""Turns what the handoff receiver reports into engine commands and, on failure, into the request's error."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from common.engine.loop import Engine
from common.engine.request import RequestId
from common.errors import HandoffError
from common.prompt_logprobs import PromptLogprobs
from common.sampling import SampledToken
from common.worker.spans import RequestSpans
from decode_worker.outbox import Outbox


class Intake:
    """The receiver's handler. Knows the outbox of every request that waits for a handoff."""

    def __init__(
        self, engine: Engine, spans: RequestSpans | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._spans = spans or RequestSpans()
        self._clock = clock
        self._outboxes: dict[RequestId, Outbox] = {}
        self.num_failed = 0
        #: Told, on the engine thread, how many seconds each handoff took from its last message to the engine, which
        #: goes on with the next decode step. The last message arrives after all KV and rows are in their slots.
        self.observe_commit: Callable[[float], None] = _ignore

    def expect(self, request_id: RequestId, outbox: Outbox) -> None:
        """From now on failures of this request's handoff go to `outbox`."""
        self._outboxes[request_id] = outbox

    def forget(self, request_id: RequestId) -> None:
        self._outboxes.pop(request_id, None)

    def on_advanced(self, request_id: RequestId, computed: int) -> None:
        """KV and rows of positions [0, computed) are in the leased slots."""
        self._engine.handoff_advanced(request_id, computed)

    def on_prompt_logprobs(self, request_id: RequestId, entries: PromptLogprobs) -> None:
        """Those of the prompt's next positions; the engine has no use for them."""
        if outbox := self._outboxes.get(request_id):
            outbox.put_prompt_logprobs(entries)

    def on_complete(self, request_id: RequestId, first_tokens: Sequence[SampledToken], num_cached: int) -> None:
        """The whole prompt is in the leased slots; `num_cached` of its tokens were not computed for it."""
        arrived = self._clock()
        self._engine.commit_handoff(request_id, first_tokens, num_cached)
        self._engine.run_between_steps(partial(self._committed, request_id, arrived))

    def _committed(self, request_id: RequestId, arrived: float) -> None:
        took_s = self._clock() - arrived
        self.observe_commit(took_s)
        self._spans.past(request_id, "take_over", took_s)

    def on_failed(self, request_id: RequestId, error: HandoffError) -> None:
        """The handoff will not be completed; the RPC handler frees the blocks when it sees the error."""
        self.num_failed += 1
        if outbox := self._outboxes.get(request_id):
            outbox.fail(error)


def _ignore(_: float) -> None:
    """Observes nothing."""
