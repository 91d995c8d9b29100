"""Every test that asks for `transport` runs once per transport."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.transports import NAMES, Transport, make_transport


@pytest.fixture(params=NAMES)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    # Not tmp_path: the path of an ipc socket has 107 bytes at most.
    with tempfile.TemporaryDirectory() as directory:
        yield make_transport(request.param, Path(directory))


@pytest.fixture
def rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket gives its peer up for a silence: neither does a busy machine cause that, nor does it help to notice."""
    monkeypatch.setattr("common.handoff.zmq_socket.HEARTBEAT_TIMEOUT_MS", 60_000)
