"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest

from tests.unit.engine.consumer import Consumer


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    consumer = Consumer()
    consumer.engine.start()
    yield consumer
    consumer.runner.gate.set()
    consumer.engine.stop()
