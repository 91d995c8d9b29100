"""The distributed load test of docs/load-testing.md."""

import re

import pytest

from tests.compose.stack import Stack
from tests.compose.watch import wait_ready
from tests.e2e.cluster import Client

pytestmark = [pytest.mark.compose, pytest.mark.timeout(400)]

RUN = ("run", "--rm", "-T", "--use-aliases", "locust-master")


async def test_a_distributed_load_test_sums_up(stack: Stack, client: Client) -> None:
    """Two workers send, and the master has the summary and the exit code of both."""
    await wait_ready(client)
    report = stack.compose(*RUN, "--users=10", "--spawn-rate=10", "--run-time=20s")
    summary = re.fullmatch(r"load: (\d+) requests, 0 failures", report.splitlines()[-1])
    assert summary is not None
    assert int(summary[1]) > 0
    workers = stack.containers("locust-worker", ended_too=True)
    assert [stack.inspect(worker)["State"]["ExitCode"] for worker in workers] == [0, 0]


def test_the_exit_code_tells_of_failures(stack: Stack) -> None:
    """The same workers are started again; nobody listens where they send to."""
    with pytest.raises(AssertionError, match="load: 0 requests"):
        stack.compose(*RUN, "--users=10", "--run-time=5s", "--host=http://router:8999")
    logs = "".join(stack.log(worker) for worker in stack.containers("locust-worker", ended_too=True))
    assert "nothing that serves answers at http://router:8999" in logs
