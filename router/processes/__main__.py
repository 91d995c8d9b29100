"""`python -m router.processes`: one of several router processes; its parent starts it, and says on stdin what it is."""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from common.config import RouterSettings
from common.errors import STARTUP_EXIT_CODE, StartupError
from common.log import configure_logging
from router.app import create_app, create_control_app
from router.listener import listening_for_siblings, listening_on
from router.processes.counter_memory import CounterMemory
from router.processes.local_app import create_local_app
from router.processes.place import READY_LINE, REFUSAL, Place
from router.processes.siblings import Siblings, socket_path
from router.server import drain_when_stopped


async def serve(settings: RouterSettings, place: Place, parent: int) -> None:
    """Serves until SIGTERM, then drains; ends at once if the parent is gone.

    `parent`: the descriptor on which it waits for READY_LINE.
    """
    directory = Path(place.directory)
    async with (
        Siblings.in_directory(directory, place.index, place.count) as siblings,
        AsyncExitStack() as listeners,
    ):
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _follow_parent)
        app = create_app(settings, siblings, CounterMemory.mapped(place.counter_fd, place.index, place.count))
        await listeners.enter_async_context(listening_on(app, _sockets(place.fds)))
        if place.control_fds:
            control = create_control_app(app)
            await listeners.enter_async_context(listening_on(control, _sockets(place.control_fds)))
        local = create_local_app(app)
        await listeners.enter_async_context(listening_for_siblings(local, socket_path(directory, place.index)))
        await drain_when_stopped(app, settings, lambda: _tell(parent, READY_LINE))


def _sockets(fds: Sequence[int]) -> list[socket.socket]:
    return [socket.socket(fileno=fd) for fd in fds]


def _tell(parent: int, line: bytes) -> None:
    os.write(parent, line)


def _follow_parent() -> None:
    """The parent writes nothing more: what can be read is the end, because it is gone. Nobody would stop us then."""
    if not os.read(sys.stdin.fileno(), 1):
        os._exit(1)


def main() -> None:
    # What anything else prints must neither look like ours nor fill a pipe that nobody reads.
    parent = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Unbuffered, so that nothing is read beyond the line.
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as stdin:
        place = msgspec.json.decode(stdin.readline(), type=Place)
    settings = RouterSettings.model_validate_json(place.settings)
    configure_logging(settings, process=f"router-{place.index}")
    try:
        asyncio.run(serve(settings, place, parent))
    except StartupError as error:
        _tell(parent, REFUSAL + error.message.replace("\n", " ").encode() + b"\n")
        sys.exit(STARTUP_EXIT_CODE)


if __name__ == "__main__":
    main()
