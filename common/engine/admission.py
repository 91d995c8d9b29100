"""Who may come in. The only engine state that two threads share, hence the lock."""

import threading
import time
from collections.abc import Callable

from common.engine.bounds import check_sampling
from common.engine.limits import EngineLimits
from common.engine.prospect import Prospect, Waiting
from common.engine.request import EngineRequest, RequestId
from common.engine.standstill import Standstill
from common.errors import DuplicateRequestError, InvalidRequestError, OverloadedError, UnavailableError


class Admission:
    """Live request ids, and how many of them still wait.

    Callers enter requests on their own thread and so learn of a refusal at once; the engine thread reports when a
    request got its seat and when it ended.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        num_usable_blocks: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._num_usable_blocks = num_usable_blocks
        self._block_size = block_size
        self._clock = clock
        self._lock = threading.Lock()
        #: When each live request came in, by the clock.
        self._live: dict[RequestId, float] = {}
        self._waiting: dict[RequestId, Waiting] = {}
        self._standstill = Standstill()
        #: Choices that are about to end; None: all of them.
        self._ending: dict[RequestId, set[int | None]] = {}
        self._closed = False
        #: How long those that wait, wait.
        self.prospect = Prospect(limits.objectives.ttft_s)
        #: Requests that were refused because too many wait, or because they would have waited too long.
        self.num_refused_full = 0
        self.num_refused_late = 0

    def enter(self, request: EngineRequest) -> None:
        """Makes the request live and waiting.

        Raises:
            InvalidRequestError: it can never be served here.
            UnavailableError: the engine stopped.
            DuplicateRequestError: its id is live.
            OverloadedError: too many requests wait, or those ahead take longer than the TTFT objective allows.
        """
        self._check_fields(request)
        self._check_fits(request)
        with self._lock:
            if self._closed:
                raise UnavailableError("the engine has stopped; send the request to another worker")
            if request.request_id in self._live:
                raise DuplicateRequestError(
                    f"request id {request.request_id!r} is in use by a live request; choose another",
                    param="request_id",
                )
            now = self._clock()
            running = self._standstill.read(now)
            self._check_queue(request, running)
            self._live[request.request_id] = now
            self._waiting[request.request_id] = Waiting.of(request, running)

    def _check_queue(self, request: EngineRequest, now: float) -> None:
        if len(self._waiting) >= self._limits.max_waiting:
            self.num_refused_full += 1
            raise OverloadedError(f"{len(self._waiting)} requests wait already; retry later")
        try:
            self.prospect.check(request, self._waiting.values(), now)
        except OverloadedError:
            self.num_refused_late += 1
            raise

    def seat(self, request_id: RequestId) -> float:
        """The request waits no longer; returns the seconds that it waited."""
        with self._lock:
            waited = self._waiting.pop(request_id, None)
            return 0.0 if waited is None else self._clock() - self._live[request_id]

    def stand_still(self) -> None:
        """A freeze begins: until `go_on` no time passes for the prospect. Requests may come in all the same."""
        with self._lock:
            self._standstill.begin(self._clock())

    def go_on(self) -> None:
        """Undoes `stand_still`."""
        with self._lock:
            self._standstill.end(self._clock())

    def age(self, request_id: RequestId) -> float:
        """Seconds since a live request came in."""
        with self._lock:
            return self._clock() - self._live[request_id]

    def leave(self, request_id: RequestId) -> None:
        """The request ended; its id may be used again."""
        with self._lock:
            self._forget(request_id)

    def try_begin_end(self, request_id: RequestId, choice: int | None = None) -> bool:
        """True for the first wish to end a live request, or one of its choices: others need not reach the engine."""
        with self._lock:
            if request_id not in self._live:
                return False
            ending = self._ending.setdefault(request_id, set())
            if choice in ending or None in ending:
                return False
            ending.add(choice)
            return True

    def is_live(self, request_id: RequestId) -> bool:
        with self._lock:
            return request_id in self._live

    def close(self) -> list[RequestId]:
        """Lets nobody in any more; returns, and forgets, the ids that were live."""
        with self._lock:
            self._closed = True
            orphans = sorted(self._live)
            for request_id in orphans:
                self._forget(request_id)
            return orphans

    def _forget(self, request_id: RequestId) -> None:
        self._live.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._ending.pop(request_id, None)

    def _check_fields(self, request: EngineRequest) -> None:
        """The router has checked these; a peer that skips the router must not reach an index with them."""
        if not request.prompt:
            raise InvalidRequestError("the prompt is empty; send at least one token id", param="token_ids")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._limits.vocab_size:
            raise InvalidRequestError(
                f"a prompt token id is outside the vocabulary [0, {self._limits.vocab_size})", param="token_ids"
            )
        if request.sampling.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens must be at least 1, got {request.sampling.max_tokens}", param="max_tokens"
            )
        check_sampling(request.sampling, self._limits.vocab_size)
        start = request.routing_start
        if start is not None and not 0 <= start <= len(request.prompt):
            raise InvalidRequestError(
                f"routed_experts_prompt_start must be in [0, {len(request.prompt)}], got {start}",
                param="routed_experts_prompt_start",
            )

    def _check_fits(self, request: EngineRequest) -> None:
        num_prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
        if num_prompt + max_tokens > self._limits.max_model_len:
            raise InvalidRequestError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed the context of "
                f"{self._limits.max_model_len} tokens; shorten one of them",
                param="max_tokens",
            )
        num_blocks = -(-request.num_slots // self._block_size)
        if num_blocks > self._num_usable_blocks:
            raise InvalidRequestError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} need {num_blocks} KV blocks, but this worker "
                f"has {self._num_usable_blocks}; shorten one of them or give the worker a larger KV cache",
                param="max_tokens",
            )
