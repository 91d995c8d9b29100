"""Tests that share a cluster have to run in one process, which the runner is to know."""

import pytest


@pytest.mark.xdist_group("a-group")
def test_the_group_of_a_test_reaches_the_scheduler(request: pytest.FixtureRequest, worker_id: str) -> None:
    """pytest-xdist writes it into the test's id, which not every version of pytest lets it do."""
    if worker_id == "master":
        pytest.skip("all tests run in this process")
    advice = "run with --dist loadgroup, and with a pytest that goes with pytest-xdist"
    assert request.node.nodeid.endswith("@a-group"), advice
