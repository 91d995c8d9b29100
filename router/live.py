"""The requests that are being served, by id: no id twice, abort from outside, and the wait for none to be left."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.errors import DuplicateRequestError, MoerelayError, UnavailableError
from router.failure import Failure
from router.fleet import Pair


@dataclass(slots=True)
class LivePrompt:
    """A prompt that workers know about (or are about to)."""

    request_id: str
    #: Without prefill from the moment on at which decode says that it needs none.
    pair: Pair
    #: Position of the prompt in the request.
    index: int
    #: Decode has told something of it.
    begun: bool = False


@dataclass(slots=True)
class LiveRequest:
    """One request between its first and its last byte. Once `aborted`, no further prompt is opened."""

    request_id: str
    #: What the client calls the conversation that the request belongs to.
    session: str | None = None
    aborted: bool = False
    #: Single choices that were aborted: (index of the prompt, choice).
    aborted_choices: set[tuple[int, int]] = field(default_factory=set)
    prompts: dict[str, LivePrompt] = field(default_factory=dict)
    #: Ends the whole request, also prompts that are not opened yet.
    failure: Failure = field(default_factory=Failure)

    @contextmanager
    def serving(self, prompt: LivePrompt) -> Iterator[None]:
        """For as long as workers serve the prompt."""
        self.prompts[prompt.request_id] = prompt
        try:
            yield
        finally:
            del self.prompts[prompt.request_id]


class LiveRequests:
    """Every live request of this router."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveRequest] = {}
        #: Ids of single choices of live requests; no request may take one.
        self.choice_ids: set[str] = set()
        #: Readiness says no. Set before `refusing`, so that load balancers have heard of it by then.
        self.draining = False
        #: Once set, live requests go on and new ones are refused.
        self.refusing = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def register(self, request_id: str, session: str | None = None) -> Iterator[LiveRequest]:
        """Raises DuplicateRequestError if something live has this id, UnavailableError once `refusing`."""
        if self.refusing:
            raise UnavailableError("the router is draining and takes no new requests")
        if request_id in self._by_id or request_id in self.choice_ids:
            raise DuplicateRequestError(f"a live request has the id {request_id!r} already", param="request_id")
        live = self._by_id[request_id] = LiveRequest(request_id, session)
        self._empty.clear()
        try:
            yield live
        finally:
            del self._by_id[request_id]
            if not self._by_id:
                self._empty.set()

    def get(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    def requests(self) -> list[LiveRequest]:
        """All of them, as of now."""
        return list(self._by_id.values())

    def fail_all(self, error: MoerelayError) -> None:
        """Ends every live request with `error`."""
        for live in self._by_id.values():
            live.failure.set(error)

    async def wait_empty(self) -> None:
        await self._empty.wait()
