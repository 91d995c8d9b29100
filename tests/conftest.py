"""What holds for every test process."""

import pytest
import torch
from hypothesis import settings


def pytest_configure() -> None:
    # Several threads per process on shared cores only wait for one another.
    torch.set_num_threads(1)
    # A deadline per example would fail on a busy machine; the timeout per test is enough.
    settings.register_profile("moerelay", deadline=None)
    settings.load_profile("moerelay")


@pytest.fixture
def patient_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handoff socket gives its peer up for a silence within a minute.

    So a pause of a busy machine ends no connection, and what a test sees end was not ended by such a timeout.
    """
    monkeypatch.setattr("common.handoff.zmq_socket.HEARTBEAT_TIMEOUT_MS", 60_000)
    monkeypatch.setattr("common.handoff.zmq_socket.HANDSHAKE_TIMEOUT_MS", 60_000)
    monkeypatch.setattr("common.handoff.zmq_channel.CONNECT_TIMEOUT_MS", 60_000)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests recorded as their "summary", also when they ran in another process."""
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    # As tuples: from another process they may come as lists.
    properties = [tuple(pair) for report in reports for pair in getattr(report, "user_properties", ())]
    for name, value in dict.fromkeys(properties):
        if name == "summary":
            terminalreporter.write_line(str(value))
