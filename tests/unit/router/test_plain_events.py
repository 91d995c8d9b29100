"""Events that bring ids and rows and nothing else: the documented form to the byte, in frames."""

import asyncio
import io
from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.plain_events import PlainEvents
from router.response_schemas import GenerateStreamResponse
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import all_opened, running, split_events
from tests.unit.router.test_client import post_bytes

PROMPT = [5, 6, 7]
NUM_TOKENS = 6


def documented(name: str, choice: dict[str, Any]) -> bytes:
    """As pydantic writes an event of one choice."""
    event = {"request_id": name, "usage": None, "prompt_token_ids": None, "choices": [choice]}
    return GenerateStreamResponse.model_validate(event).model_dump_json().encode()


def choice(index: int, token_ids: list[int], rows: str | None, **fields: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("finish_reason", "stop_reason", "logprobs", "sampling_mask", "weight_versions"))
    return {"index": index, "token_ids": token_ids, "routed_experts": rows} | nothing | fields


@given(
    st.text(),
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
    st.one_of(st.none(), st.binary().map(lambda data: b64encode(data).decode())),
)
def test_whatever_the_name_of_the_request(name: str, token_ids: list[int], rows: str | None) -> None:
    events = PlainEvents(lambda ids, rows: (documented(name, choice(3, ids, rows)),))
    for _ in range(2):
        assert b"".join(events.event(token_ids, rows)) == documented(name, choice(3, token_ids, rows))


def npy(first_row: int, end_row: int) -> str:
    file = io.BytesIO()
    np.save(file, expected_rows(first_row, end_row, description()))
    return b64encode(file.getvalue()).decode()


async def answer(version: str, name: str) -> bytes:
    """Everything that a client reads of a stream of one token per event, up to the end of the connection."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": NUM_TOKENS, "ignore_eos": True}, "stream": True}
    request = post_bytes(body | {"request_id": name}).replace(b"HTTP/1.1", version.encode())
    async with running(Script(chunk_tokens=1), both=True) as cluster:
        await all_opened(cluster)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
        writer.write(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        raw = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await writer.wait_closed()
    return raw


def unchunked(body: bytes) -> bytes:
    """RFC 9112, section 7.1: size in hexadecimal, data, and an empty chunk at the end."""
    parts: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        data, body = body[: int(size, 16)], body[int(size, 16) :]
        assert body.startswith(b"\r\n")
        body = body[2:]
        if not data:
            assert body == b""
            return b"".join(parts)
        parts.append(data)


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
async def test_a_stream_byte_by_byte(version: str) -> None:
    name = 'a"b'
    head, _, body = (await answer(version, name)).partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == "HTTP/1.1")
    events = split_events(unchunked(body) if version == "HTTP/1.1" else body)
    tokens = expected_tokens(PROMPT, NUM_TOKENS)
    end = {"finish_reason": "length", "weight_versions": [{"version": "7", "start": 0, "end": NUM_TOKENS}]}
    assert events == [
        documented(name, choice(0, tokens[:1], npy(0, 3))),
        *(documented(name, choice(0, tokens[at : at + 1], npy(2 + at, 3 + at))) for at in range(1, NUM_TOKENS - 1)),
        documented(name, choice(0, tokens[-1:], npy(1 + NUM_TOKENS, 2 + NUM_TOKENS), **end)),
        b"[DONE]",
    ]
