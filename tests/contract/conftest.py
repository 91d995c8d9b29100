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
