"""Log lines about a request name it, and those of the next one on the same connection do not."""

from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from common.errors import HandoffTimeoutError
from tests.fakes.fake_workers import Script
from tests.unit.router.cluster import running


async def test_a_failed_request_is_logged_with_its_id_and_the_next_one_with_its_own() -> None:
    script = Script(break_after=1, decode_error=HandoffTimeoutError("too late"))
    with capture_logs(processors=[merge_contextvars]) as lines:
        async with running(script) as cluster:
            for name in ("one", "two"):
                status, _ = await cluster.post(
                    {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}, headers={"X-Request-Id": name}
                )
                assert status == 504
    failed = [line for line in lines if line["event"] == "request_failed"]
    assert [line["request_id"] for line in failed] == ["one", "two"]
    assert {(line["log_level"], line["kind"]) for line in failed} == {("warning", "HandoffTimeoutError")}
    ended = [line for line in lines if line["event"] == "request_ended"]
    assert [(line["request_id"], line["outcome"]) for line in ended] == [
        ("one", "HandoffTimeoutError"),
        ("two", "HandoffTimeoutError"),
    ]


async def test_a_line_about_no_request_names_none() -> None:
    """Also if it is written for the connection on which one was: here that a worker's metrics cannot be read."""
    script = Script(exposition="no metric{")
    with capture_logs(processors=[merge_contextvars]) as lines:
        async with running(script) as cluster:
            await cluster.post(
                {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}, headers={"X-Request-Id": "r"}
            )
            async with cluster.http.get("/metrics") as response:
                await response.read()
                assert response.status == 500
    [failed] = [line for line in lines if line["event"] == "handler_failed"]
    assert "request_id" not in failed
