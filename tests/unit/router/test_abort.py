"""Abort by the id the client knows: what is there is returned, and every worker hears of it."""

import asyncio
from typing import Any

import numpy as np

from common.errors import HandoffError
from common.routing.codec import base642numpy
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import choice_events, parse_events, running

ABORT = "/inference/v1/abort_requests"
BODY: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "sampling_params": {"max_tokens": 10, "n": 2},
    "request_id": "mine",
}


async def test_abort_while_tokens_flow() -> None:
    async with running(Script(hold_after=8)) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY))
        decode = cluster.decode[0]
        await decode.wait_until(lambda: decode.num_chunks == 8)
        status, answer = await cluster.post({"request_ids": ["mine", "other"]}, ABORT)
        assert (status, answer) == (200, {"aborted": ["mine"], "unknown": ["other"]})
        _, answer = await request
        assert set(decode.abort_requests) == {request.request_id for request in decode.decode_requests}
        assert set(cluster.prefill[0].abort_requests) == set(decode.abort_requests)
    for choice in answer["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
        assert choice["token_ids"] == expected_tokens([5, 6, 7], 4, choice["index"])
        np.testing.assert_array_equal(base642numpy(choice["routed_experts"]), expected_rows(0, 6, description()))
        assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 4}]
    assert answer["usage"]["completion_tokens"] == 8


NOTHING = {
    "index": 0,
    "token_ids": [],
    "finish_reason": "abort",
    "stop_reason": None,
    "logprobs": None,
    "routed_experts": None,
    "sampling_mask": None,
    "weight_versions": [],
}


async def test_abort_before_the_first_token_has_null_rows() -> None:
    async with running(Script(hold_after=0)) as cluster:
        decode, body = cluster.decode[0], BODY | {"sampling_params": {"max_tokens": 10}}
        whole = asyncio.ensure_future(cluster.post(body))
        await decode.wait_until(lambda: len(decode.live) == 1)
        assert (await cluster.post({"request_ids": ["mine"]}, ABORT))[0] == 200
        assert (await whole)[1]["choices"] == [NOTHING]
        stream = asyncio.ensure_future(cluster.stream(body))
        await decode.wait_until(lambda: len(decode.live) == 1)
        assert (await cluster.post({"request_ids": ["mine"]}, ABORT))[0] == 200
        assert choice_events(parse_events(await stream)) == [NOTHING]


async def test_rows_sent_before_an_abort_without_tokens_are_void() -> None:
    """The prompt's rows have gone out; the terminal event still says null, and stays legal."""
    async with running(Script(prompt_chunk=2, hold_after=1)) as cluster:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 10}, "request_id": "mine"}
        request = asyncio.ensure_future(cluster.stream(body))
        decode = cluster.decode[0]
        await decode.wait_until(lambda: decode.num_chunks == 1)
        await cluster.post({"request_ids": ["mine"]}, ABORT)
        first, last = choice_events(parse_events(await request))
    assert (len(base642numpy(first["routed_experts"])), first["token_ids"]) == (2, [])
    assert (last["routed_experts"], last["finish_reason"]) == (None, "abort")


async def test_prefill_that_fails_because_of_an_abort_is_no_error() -> None:
    script = Script(hold_after=1, prefill_error=HandoffError("the decode worker gave up"))
    script.prefill_go.clear()
    async with running(script) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY | {"sampling_params": {"max_tokens": 10}}))
        decode = cluster.decode[0]
        await decode.wait_until(lambda: decode.num_chunks == 1)
        await cluster.post({"request_ids": ["mine"]}, ABORT)
        script.prefill_go.set()
        status, answer = await request
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert answer["choices"][0]["token_ids"] == [18]


async def test_abort_before_the_lease_starts_no_prefill() -> None:
    script = Script()
    script.lease_go.clear()
    async with running(script) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY | {"sampling_params": {"max_tokens": 10}}))
        decode = cluster.decode[0]
        await decode.wait_until(lambda: len(decode.live) == 1)
        await cluster.post({"request_ids": ["mine"]}, ABORT)
        script.lease_go.set()
        status, answer = await request
        assert (status, answer["choices"]) == (200, [NOTHING])
        assert cluster.prefill[0].prefill_requests == []


async def test_unknown_ids_and_wrong_bodies() -> None:
    async with running() as cluster:
        status, answer = await cluster.post({"request_ids": ["nobody"]}, ABORT)
        assert (status, answer["error"]["type"], answer["error"]["param"]) == (404, "NotFoundError", "request_ids")
        wrong: list[Any] = [{}, {"request_ids": []}, {"request_ids": "mine"}, {"request_ids": [1]}]
        for body in wrong:
            status, answer = await cluster.post(body, ABORT)
            assert (status, answer["error"]["param"]) == (400, "request_ids")
