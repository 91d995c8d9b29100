"""How many connections a listener keeps, and what becomes of one for which there is no descriptor."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from aiohttp import web

#: Of the process's descriptors, those that are no clients': of workers' channels, files, and the other listeners.
RESERVED_DESCRIPTORS = 64

#: Of a listener that has few clients: the control port.
FEW_CONNECTIONS = 16

#: How many connections the application's listener keeps, if not as many as there can be; set by the application.
MAX_CONNECTIONS = web.AppKey("max_connections", int)

#: The log says at most so often that there are too many.
TELL_INTERVAL_S = 1.0

#: asyncio's words for a connection that waits and cannot be accepted.
_ACCEPT_FAILED = "socket.accept() out of system resource"

log = structlog.get_logger()


def max_connections() -> int:
    """What the limit of descriptors of this process leaves for clients."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(FEW_CONNECTIONS, soft - RESERVED_DESCRIPTORS)


class Tally:
    """Says an event in the log, with its number since it was said last, and at most once in a while."""

    def __init__(self, event: str, hint: str, now: Callable[[], float] = time.monotonic) -> None:
        self._event = event
        self._hint = hint
        self._now = now
        self._number = 0
        self._told_at = float("-inf")

    def count(self, **details: object) -> None:
        self._number += 1
        now = self._now()
        if now - self._told_at < TELL_INTERVAL_S:
            return
        log.warning(self._event, number=self._number, hint=self._hint, **details)
        self._number, self._told_at = 0, now


class SpareDescriptor:
    """Given up for a moment, so that a connection can be accepted and closed when there is no descriptor left.

    asyncio would leave it waiting, and try again so often that it does little else.
    """

    def __init__(self) -> None:
        self._spare: int | None = _spare()
        self._tally = Tally("no_descriptor_for_connection", "raise the limit of open files (ulimit -n)")

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As the exception handler of the loop."""
        if context.get("message") != _ACCEPT_FAILED:
            loop.default_exception_handler(context)
            return
        self._tally.count(error=str(context["exception"]))
        self._refuse_one(context["socket"].fileno())

    def _refuse_one(self, listening: int) -> None:
        self.close()
        listener = socket.socket(fileno=listening)
        with suppress(OSError):  # somebody else was quicker, at the client or at the descriptor
            listener.accept()[0].close()
        listener.detach()
        self._spare = _spare()

    def close(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


@contextmanager
def closing_what_cannot_be_kept() -> Iterator[None]:
    """For the running event loop: see `SpareDescriptor`."""
    loop, spare = asyncio.get_running_loop(), SpareDescriptor()
    before = loop.get_exception_handler()
    loop.set_exception_handler(spare.handle)
    try:
        yield
    finally:
        loop.set_exception_handler(before)
        spare.close()
