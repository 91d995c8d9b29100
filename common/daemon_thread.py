"""Calls that may never return, beside an event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

ValueT = TypeVar("ValueT")


async def on_daemon_thread(call: Callable[[], ValueT], name: str) -> ValueT:
    """As `asyncio.to_thread`, but no process waits at its end for a call that hangs. Raises what the call does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ValueT] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not future.done():
            settled()

    def run() -> None:
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to whoever waits
            failed = error
            tell(lambda: future.set_exception(failed))
        else:
            tell(lambda: future.set_result(value))

    def tell(settled: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, nobody waits any more
            loop.call_soon_threadsafe(settle, settled)

    Thread(target=run, name=name, daemon=True).start()
    return await future
