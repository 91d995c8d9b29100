"""Carries engine events from the engine thread to the asyncio tasks that wait for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from common.engine.loop import Engine
from common.engine.request import EngineEvent, RequestId
from common.errors import DuplicateRequestError


class Subscriber(Protocol):
    """Takes one request's events, on the event loop, in order, without blocking."""

    def put(self, event: EngineEvent) -> None: ...


class EngineBridge:
    """One subscriber per live request. `deliver` runs on the engine thread, everything else on the event loop."""

    def __init__(self) -> None:
        self._subscribers: dict[RequestId, Subscriber] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        """Names the engine whose event batches are acknowledged."""
        self._engine = engine

    def start(self) -> None:
        """Binds to the running event loop; call before the engine starts."""
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def subscribed(self, request_id: RequestId, subscriber: Subscriber) -> Iterator[None]:
        """Routes the request's events to `subscriber`. Raises DuplicateRequestError for a live id."""
        if request_id in self._subscribers:
            raise DuplicateRequestError(f"request {request_id!r} is live already", param="request_id")
        self._subscribers[request_id] = subscriber
        try:
            yield
        finally:
            del self._subscribers[request_id]

    def deliver(self, events: list[EngineEvent]) -> None:
        """Hands one step's events to the event loop; the engine bounds how many batches may be outstanding."""
        assert self._loop is not None, "the bridge is started before the engine"
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[EngineEvent]) -> None:
        assert self._engine is not None
        for event in events:
            # A request that was cancelled a moment ago has no subscriber any more.
            if subscriber := self._subscribers.get(event.request_id):
                subscriber.put(event)
        self._engine.events_delivered()
