"""Bodies that would hold up every other client if they were parsed where their answers are sent."""

import asyncio
import gzip
import io
import json
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from common.config import RouterSettings
from common.errors import InvalidRequestError
from router.content_encoding import unpack
from router.json_body import BODY_LIMITS, THREAD_FROM_BYTES, BodyLimits, UnknownFields, read_body
from router.keys import SETTINGS
from router.middleware import errors_as_json
from router.request_schemas import GenerateRequest
from tests.fakes.fake_workers import expected_tokens
from tests.unit.router.cluster import GENERATE, client_of, running, strict_json

MANY = 10**6

IDS = '"token_ids":[5],"sampling_params":'

#: What a client could send within 32 MiB.
HOSTILE = {
    "ids": '{"token_ids":[' + "5," * 2 * MANY + '5],"sampling_params":{}}',
    "stop strings": "{" + IDS + '{"stop":[' + '"a",' * 2 * MANY + '"a"]}}',
    "biases": "{" + IDS + '{"logit_bias":{' + ",".join(f'"{i}":1' for i in range(MANY)) + "}}}",
    "unknown fields": "{" + ",".join(f'"u{i}":1' for i in range(MANY)) + "," + IDS + "{}}",
    "arrays": "{" + IDS + '{},"x":[' + "[]," * MANY + "[]]}",
    "objects": "{" + IDS + '{},"x":[' + "{}," * MANY + "{}]}",
    "transfer parameters": "{" + IDS + '{},"kv_transfer_params":{' + ",".join(f'"{i}":0' for i in range(MANY)) + "}}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
async def test_bodies_of_very_many_parts_are_refused_unparsed(body: str) -> None:
    async with running() as cluster:
        async with cluster.http.post(GENERATE, data=io.BytesIO(body.encode())) as response:
            error = strict_json(await response.text())["error"]
            assert (response.status, error["type"]) == (400, "BadRequestError")
        assert "more than 2000000 values (--max-body-values)" in error["message"]
        await cluster.canary()


async def test_the_number_of_values_is_a_setting() -> None:
    """Eight commas, and 20 for each of four keys, two objects and an array."""
    body = {"token_ids": [5, 6, 7, 8, 9, 10, 11], "sampling_params": {"max_tokens": 1}, "stream": False}
    for most, status in ((148, 200), (147, 400)):
        # The smallest body that any client of these tests sends costs less.
        async with running(max_body_values=most) as cluster:
            assert (await cluster.post(body))[0] == status


async def test_what_is_in_a_text_does_not_count() -> None:
    async with running() as cluster:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}, "text": ",:[{" * MANY}
        async with cluster.http.post(GENERATE, data=io.BytesIO(json.dumps(body).encode())) as response:
            answer = strict_json(await response.text())
        assert answer["choices"][0]["token_ids"] == expected_tokens([5, 6, 7], 4)


@asynccontextmanager
async def parsing_in(threads: list[threading.Thread], limits: BodyLimits) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a route that reads a body, and says in which thread it is parsed."""

    async def handle(request: web.Request) -> web.Response:
        def check(_: object) -> None:
            threads.append(threading.current_thread())

        body = await read_body(request, GenerateRequest, UnknownFields(), check)
        return web.json_response(body.token_ids)

    app = web.Application(middlewares=[errors_as_json], client_max_size=2**22)
    app[SETTINGS], app[BODY_LIMITS] = RouterSettings(), limits
    app.router.add_post("/", handle)
    async with client_of(app) as http:
        yield http


async def test_only_large_bodies_are_parsed_in_a_thread_one_after_the_other() -> None:
    threads: list[threading.Thread] = []
    async with parsing_in(threads, BodyLimits(9, MANY)) as http:
        small = {"token_ids": [5], "sampling_params": {}}
        large = small | {"user": "x" * THREAD_FROM_BYTES}
        await http.post("/", json=small)
        assert threads.pop() is threading.main_thread()
        await asyncio.gather(*(http.post("/", json=large) for _ in range(5)))
        assert len(threads) == 5
        assert len(set(threads)) == 1
        assert threading.main_thread() not in threads


BODY = json.dumps({"token_ids": [5, 6], "sampling_params": {}}).encode()


def bare(body: bytes) -> bytes:
    """Deflate without zlib's header, which RFC 9110 asks for and some clients leave out."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "sent"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", bare(BODY)),
        ("identity", BODY),
    ],
    ids=["gzip", "capitals", "x-gzip", "zlib", "bare", "identity"],
)
async def test_compressed_bodies(encoding: str, sent: bytes) -> None:
    async with (
        parsing_in([], BodyLimits(9, MANY)) as http,
        http.post("/", data=sent, headers={"Content-Encoding": encoding}) as response,
    ):
        assert await response.json() == [5, 6]


@pytest.mark.parametrize(
    ("encoding", "sent", "word"),
    [
        ("gzip", gzip.compress(BODY)[:-9], "cut"),
        ("gzip", gzip.compress(BODY) * 2, "followed"),
        ("gzip", zlib.compress(BODY), "header"),
        ("deflate", gzip.compress(BODY), "gzip|invalid"),
        ("br", BODY, "send gzip"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), "send gzip"),
        ("x" * 999, BODY, "send gzip"),
    ],
    ids=["cut", "twice", "zlib for gzip", "gzip for zlib", "brotli", "nested", "long name"],
)
def test_bodies_that_are_not_encoded_as_they_say(encoding: str, sent: bytes, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as raised:
        unpack(sent, encoding, 10**6)
    assert raised.value.param == "Content-Encoding"
    assert len(raised.value.message) < 400


def test_what_unpacks_to_too_much_is_not_unpacked() -> None:
    assert unpack(gzip.compress(bytes(1000)), "gzip", 1000) == bytes(1000)
    for sent in (gzip.compress(bytes(1001)), gzip.compress(bytes(10**8))):
        with pytest.raises(web.HTTPRequestEntityTooLarge):
            unpack(sent, "gzip", 1000)


def test_unknown_fields_are_looked_at_until_nothing_more_is_logged() -> None:
    class Counting(dict[str, object]):
        looked_at = 0

        def __iter__(self) -> Iterator[str]:
            for name in super().__iter__():
                self.looked_at += 1
                yield name

    unknown = UnknownFields()
    model = GenerateRequest.model_validate({"token_ids": [5], "sampling_params": {}})
    raw = Counting({f"u{i}": 1 for i in range(10**4)} | {"token_ids": [5], "sampling_params": {}})
    with capture_logs() as logged:
        unknown.note(raw, model)
        unknown.note(raw, model)
    assert len(logged) == 256
    assert raw.looked_at == 257
