"""Ids of requests on every endpoint: no id twice, and abort by the id that the client knows.

Numbers in docstrings refer to public reports of the same fault.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.endpoints import CHAT, ENDPOINTS, SGLANG, Endpoint, Said
from tests.fakes.fake_workers import Script, expected_tokens
from tests.unit.router.cluster import Cluster, running, split_events, strict_json
from tests.unit.router.faults.test_ends import CONTENT, PROMPT, prompt_len
from tests.unit.router.faults.test_hostile_values import GENERATE_ABORT, each_endpoint

#: Chunks, of one token each, after which the fakes wait.
HELD = 4


async def answered(cluster: Cluster, endpoint: Endpoint, body: dict[str, Any], **kwargs: Any) -> Said:
    async with cluster.http.post(endpoint.path, json=body, **kwargs) as response:
        assert response.status == 200, await response.text()
        raw = await response.read()
    if not body["stream"]:
        return endpoint.read([strict_json(raw.decode())])[0]
    *events, done = split_events(raw)
    assert done == b"[DONE]"
    return endpoint.read([strict_json(event.decode()) for event in events])[0]


@asynccontextmanager
async def held(model: str, chunks: int = HELD) -> AsyncIterator[tuple[Cluster, Script]]:
    """A cluster that stands still once a request has so many tokens."""
    script = Script(hold_after=chunks)
    async with running(script, model=model) as cluster:
        yield cluster, script


async def until_held(cluster: Cluster, num_chunks: int = HELD) -> None:
    decode = cluster.decode[0]
    await decode.wait_until(lambda: len(decode.live) == 1 and decode.num_chunks >= num_chunks)


def abort_of(path: str, name: str) -> dict[str, Any]:
    return {"rid": name} if path == "/abort_request" else {"request_ids": [name]}


each_abort = pytest.mark.parametrize("abort_path", [GENERATE_ABORT, "/abort_request"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@each_endpoint
@streamed_or_not
async def test_one_id_twice(endpoint: Endpoint, stream: bool, model: str) -> None:
    """vllm#10583, #15041, #27987, #27711: the second one is a 409 on every endpoint; the first one is untouched.

    Once it has ended, its id is free again, although prefill may have heard of it last.
    """
    async with held(model) as (cluster, script):
        headers = {"X-Request-Id": "twin"}
        body = endpoint.body(PROMPT, CONTENT, stream=stream, max_tokens=6, logprobs=0)
        first = asyncio.ensure_future(answered(cluster, endpoint, body, headers=headers))
        await until_held(cluster)
        for other in ENDPOINTS:
            for again, given in (
                (other.body([9], stream=stream, max_tokens=2), headers),
                (other.body([9], stream=not stream, max_tokens=2, request_id="twin"), {}),
            ):
                status, answer = await cluster.post(again, other.path, headers=given)
                assert (status, answer["error"]["type"]) == (409, "ConflictError")
                assert answer["error"]["param"] in ("request_id", other.spelled("request_id"))
        assert len(cluster.decode[0].decode_requests) == 1
        script.release.set()
        said = await first
        assert said.token_ids == expected_tokens(PROMPT, 6)
        assert said.rows is not None
        assert len(said.rows) == prompt_len(endpoint) + 5
        assert (await answered(cluster, endpoint, body, headers=headers)).token_ids == said.token_ids
        await cluster.canary()


def id_of(endpoint: Endpoint, payload: dict[str, Any]) -> str:
    """As the answer spells it."""
    found = payload["meta_info"]["id"] if endpoint is SGLANG else payload.get("id") or payload["request_id"]
    assert isinstance(found, str)
    return found


@each_endpoint
@each_abort
async def test_abort_by_the_id_of_the_first_event(endpoint: Endpoint, abort_path: str, model: str) -> None:
    """SkyRL#1250: the id that we made, as the stream says it; the end comes although the worker goes no further."""
    async with held(model) as (cluster, _):
        body = endpoint.body(PROMPT, CONTENT, stream=True, max_tokens=20, logprobs=0)
        async with cluster.http.post(endpoint.path, json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            name = id_of(endpoint, strict_json(first[6:].decode()))
            assert name == response.headers["X-Request-Id"]
            await until_held(cluster)
            async with asyncio.timeout(30):
                status, _ = await cluster.post(abort_of(abort_path, name), abort_path)
                rest = await response.read()
        assert status == 200
        *events, done = split_events(first + rest)
        assert done == b"[DONE]"
        assert_kept(endpoint, endpoint.read([strict_json(event.decode()) for event in events])[0])
        status, _ = await cluster.post(abort_of(abort_path, name), abort_path)
        assert status == 404
        await cluster.decode[0].wait_idle()


def assert_kept(endpoint: Endpoint, said: Said, num_tokens: int = HELD) -> None:
    """Tokens, logprobs and rows up to the abort, of equal span; one reason."""
    assert (said.finish, said.num_finishes, said.went_on) == ("abort", 1, False)
    assert said.token_ids == expected_tokens(PROMPT, num_tokens)
    assert said.num_logprobs == num_tokens
    assert said.rows is not None
    assert len(said.rows) == prompt_len(endpoint) + num_tokens - 1
    if endpoint.has_text:
        assert said.text == "héE"


@each_endpoint
@each_abort
@streamed_or_not
async def test_abort_by_the_clients_id(endpoint: Endpoint, abort_path: str, stream: bool, model: str) -> None:
    """SkyRL#1250, sglang#11673, vllm#22197: partial tokens, logprobs and rows are kept; named in the body."""
    async with held(model) as (cluster, _):
        body = endpoint.body(PROMPT, CONTENT, stream=stream, max_tokens=20, logprobs=0, request_id="mine")
        request = asyncio.ensure_future(answered(cluster, endpoint, body))
        await until_held(cluster)
        async with asyncio.timeout(30):
            status, _ = await cluster.post(abort_of(abort_path, "mine"), abort_path)
            said = await request
        assert status == 200
        assert_kept(endpoint, said)


@each_endpoint
@streamed_or_not
async def test_abort_of_everything(endpoint: Endpoint, stream: bool, model: str) -> None:
    """sglang#11673, vllm#22197: abort_all ends requests of every dialect in the middle and keeps what they have."""
    async with held(model) as (cluster, _):
        body = endpoint.body(PROMPT, CONTENT, stream=stream, max_tokens=20, logprobs=0)
        request = asyncio.ensure_future(answered(cluster, endpoint, body))
        await until_held(cluster)
        status, answer = await cluster.post({"abort_all": True}, "/abort_request")
        assert (status, len(answer["aborted"])) == (200, 1)
        assert_kept(endpoint, await request)


@each_endpoint
@streamed_or_not
async def test_abort_before_the_first_token(endpoint: Endpoint, stream: bool, model: str) -> None:
    """vime#49, on every endpoint: no tokens, no rows, one reason."""
    async with held(model, 0) as (cluster, _):
        body = endpoint.body(PROMPT, CONTENT, stream=stream, max_tokens=20, logprobs=0, request_id="mine")
        request = asyncio.ensure_future(answered(cluster, endpoint, body))
        await until_held(cluster, 0)
        assert (await cluster.post(abort_of(GENERATE_ABORT, "mine"), GENERATE_ABORT))[0] == 200
        said = await request
        assert (said.finish, said.num_finishes, said.token_ids, said.rows) == ("abort", 1, [], None)
        assert not said.text


@each_abort
@pytest.mark.parametrize("name", ["nobody", "x" * 10_000, "é", " ", "generate-0"])
async def test_abort_of_nobody(abort_path: str, name: str) -> None:
    """SkyRL#1250: an unknown id is a 404, and repeated in part only."""
    async with running() as cluster:
        status, answer = await cluster.post(abort_of(abort_path, name), abort_path)
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        assert len(answer["error"]["message"]) < 1000
        await cluster.canary()


@each_endpoint
async def test_the_first_token_is_sent_at_once(endpoint: Endpoint, model: str) -> None:
    """production-stack#777: it reaches the client while the worker has not computed the second of a hundred."""
    async with held(model, 1) as (cluster, script):
        body = endpoint.body(PROMPT, CONTENT, stream=True, max_tokens=100, ignore_eos=True)
        async with cluster.http.post(endpoint.path, json=body) as response:
            said, events = Said(), []
            async with asyncio.timeout(30):
                while not said.token_ids:
                    line = await response.content.readuntil(b"\n\n")
                    events.append(strict_json(line[6:].decode()))
                    said = endpoint.read(events)[0]
            assert (said.token_ids, cluster.decode[0].num_chunks) == ([100], 1)
            script.release.set()
            await response.read()


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_every_limit_of_chat_reaches_prefill(limit: str, model: str) -> None:
    """production-stack#777: the hop to prefill knows the same limit as that to decode, whatever it is called.

    Prefill has no way to make more than the one token that the prompt's logits bring; that it is one, and counted once,
    is `tests/e2e/test_every_endpoint.py`.
    """
    async with running(model=model) as cluster:
        fields: dict[str, Any] = {limit: 50}
        status, answer = await cluster.post(CHAT.body(PROMPT, CONTENT, ignore_eos=True, **fields), CHAT.path)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 50)
        (prefill,), (decode,) = cluster.prefill[0].prefill_requests, cluster.decode[0].decode_requests
        assert prefill.sampling.max_tokens == decode.sampling.max_tokens == 50
