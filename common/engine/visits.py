"""Calls of other threads that run on the engine's thread between two steps."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from common.errors import UnavailableError

ResultT = TypeVar("ResultT")


class Visits:
    """The futures of calls that the engine thread has not run yet; none stays without an outcome when it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._closed = False

    def enter(self, future: Future[Any]) -> bool:
        """False if the engine has ended: the future has failed."""
        future.add_done_callback(self._pending.discard)
        with self._lock:
            if self._closed:
                self._fail(future)
                return False
            self._pending.add(future)
            return True

    def close(self) -> None:
        """The engine has ended: whatever is pending fails, and so does what comes later."""
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for future in pending:
            self._fail(future)

    @staticmethod
    def _fail(future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_exception(UnavailableError("the engine has stopped; restart this worker"))


def run_visit(visit: Callable[[], ResultT], future: Future[ResultT]) -> None:
    """On the engine thread: the visit's outcome becomes that of the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(visit())
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the caller, not to the engine
        future.set_exception(error)
