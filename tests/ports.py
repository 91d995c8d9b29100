"""Ports that a test keeps: one that was drawn and closed again may be anybody's in the next moment."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections, until the test itself listens there.

    Nobody draws it as a free one, and nobody connects from it. That the test may bind what is bound here is Linux's
    rule; on macOS it fails with EADDRINUSE.
    """
    with socket.socket() as bound:
        # What servers set as well: then they may bind what is bound, as long as nobody listens there.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextmanager
def reserved_address() -> Iterator[str]:
    """The same with its host."""
    with reserved_port() as port:
        yield f"127.0.0.1:{port}"
