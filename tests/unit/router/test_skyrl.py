"""Rows as an object: dict payloads of /inference/v1/generate, and /skyrl/v1/generate. Read as the clients do."""

import json
import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64
import pytest

from common.routing.record import RoutingLayout
from router.forms import RoutedExperts
from router.response_schemas import GenerateResponse, GenerateStreamResponse
from router.rows import Rows
from router.rows_format import format_rows
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import Cluster, running, split_events

PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 110]
PREFIX = b'"routed_experts":{"data":"'
GENERATE, SKYRL = "/inference/v1/generate", "/skyrl/v1/generate"


def rows_of(payload: dict[str, Any]) -> npt.NDArray[np.generic]:
    """As SkyRL and prime-rl: strict base64, and exactly the bytes that shape and dtype say."""
    assert list(payload) == ["data", "shape", "dtype", "start"]
    data = pybase64.b64decode(payload["data"], validate=True)
    dtype = np.dtype(payload["dtype"]).newbyteorder("<")
    assert len(data) == int(np.prod(payload["shape"])) * dtype.itemsize
    return np.frombuffer(data, dtype).reshape(payload["shape"])


def strip_rows(raw: bytes) -> tuple[bytes, bytes]:
    """As prime-rl's client: the data is cut out of the text before anything is parsed."""
    begin = raw.index(PREFIX) + len(PREFIX)
    end = raw.index(b'"', begin)
    return raw[:begin] + raw[end:], raw[begin:end]


def body_of(stream: bool = False, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4} | sampling, "stream": stream}


async def whole(cluster: Cluster, path: str, **sampling: Any) -> bytes:
    async with cluster.http.post(path, json=body_of(**sampling)) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def events(cluster: Cluster, path: str, **sampling: Any) -> list[bytes]:
    async with cluster.http.post(path, json=body_of(stream=True, **sampling)) as response:
        assert response.status == 200, await response.text()
        raw = split_events(await response.read())
    assert raw[-1] == b"[DONE]"
    return raw[:-1]


ASKED = [
    pytest.param(GENERATE, {"routed_experts_format": "dict"}, {}, id="request"),
    pytest.param(GENERATE, {}, {"routed_experts_format": "dict"}, id="server"),
    pytest.param(SKYRL, {}, {}, id="skyrl"),
    # On SkyRL's endpoint rows are its own, whatever else was asked for.
    pytest.param(SKYRL, {"routed_experts_format": "npy"}, {}, id="skyrl-npy"),
]


@pytest.mark.parametrize(("path", "sampling", "settings"), ASKED)
@pytest.mark.parametrize("start", [0, 3, 10])
async def test_the_literal_prefix_finds_the_rows(
    path: str, sampling: dict[str, Any], settings: dict[str, Any], start: int
) -> None:
    async with running(**settings) as cluster:
        raw = await whole(cluster, path, routed_experts_prompt_start=start, **sampling)
    stripped, data = strip_rows(raw)
    answer = json.loads(stripped)
    payload = answer["choices"][0]["routed_experts"]
    assert payload == {"data": "", "shape": [13 - start, 2, 2], "dtype": "uint8", "start": start}
    np.testing.assert_array_equal(rows_of(payload | {"data": data}), expected_rows(start, 13, description()))
    GenerateResponse.model_validate_json(raw)
    assert answer["choices"][0]["token_ids"] == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize(("path", "sampling", "settings"), ASKED)
async def test_every_delta_says_where_it_starts(path: str, sampling: dict[str, Any], settings: dict[str, Any]) -> None:
    async with running(Script(prompt_chunk=3), **settings) as cluster:
        streamed = await events(cluster, path, routed_experts_prompt_start=2, **sampling)
    position, parts, tokens = 2, [], []
    for event in streamed:
        GenerateStreamResponse.model_validate_json(event)
        (choice,) = json.loads(event)["choices"]
        tokens += choice["token_ids"]
        if choice["routed_experts"] is not None:
            assert PREFIX in event
            rows = rows_of(choice["routed_experts"])
            assert choice["routed_experts"]["start"] == position
            position += len(rows)
            parts.append(rows)
    assert len(parts) > 2
    assert tokens == expected_tokens(PROMPT, 4)
    np.testing.assert_array_equal(np.concatenate(parts), expected_rows(2, 13, description()))


async def test_a_final_stream_carries_them_once() -> None:
    async with running(stream_routed_experts="final") as cluster:
        streamed = await events(cluster, SKYRL, routed_experts_prompt_start=1)
    choices = [json.loads(event)["choices"][0] for event in streamed]
    assert [choice["routed_experts"] is not None for choice in choices] == [False, False, False, True]
    np.testing.assert_array_equal(rows_of(choices[-1]["routed_experts"]), expected_rows(1, 13, description()))
    assert choices[-1]["routed_experts"]["start"] == 1


@pytest.mark.parametrize(
    ("num_experts", "routing_dtype", "total", "dtype"),
    [
        (8, "uint8", 20, "uint8"),
        # Row `t` holds the ids `t` to `t + 2`: up to position 253 one byte is enough, whatever the model's dtype.
        (512, "uint16", 254, "uint8"),
        (512, "uint16", 256, "int16"),
        (70_000, "int32", 254, "uint8"),
        (70_000, "int32", 256, "int16"),
    ],
)
async def test_skyrl_reads_the_smallest_dtype(num_experts: int, routing_dtype: str, total: int, dtype: str) -> None:
    model = description(num_experts=num_experts, routing_dtype=routing_dtype, max_model_len=512)
    sampling = {"max_tokens": total - len(PROMPT), "ignore_eos": True}
    async with running(Script(model, chunk_tokens=16)) as cluster:
        skyrl = json.loads(await whole(cluster, SKYRL, **sampling))["choices"][0]["routed_experts"]
        own = json.loads(await whole(cluster, GENERATE, routed_experts_format="dict", **sampling))
    assert (skyrl["dtype"], skyrl["shape"]) == (dtype, [total - 1, 2, 2])
    np.testing.assert_array_equal(rows_of(skyrl), expected_rows(0, total - 1, model))
    # Elsewhere the dtype is the model's, and never the values'.
    assert own["choices"][0]["routed_experts"]["dtype"] == routing_dtype


async def test_no_rows_is_null() -> None:
    async with running() as cluster:
        for path in (SKYRL, GENERATE):
            raw = await whole(cluster, path, return_routed_experts=False, routed_experts_format="dict")
            assert b'"routed_experts":null' in raw


async def test_several_choices_and_offsets() -> None:
    async with running() as cluster:
        raw = await whole(cluster, SKYRL, n=2, max_tokens=2, ignore_eos=True)
        for choice in json.loads(raw)["choices"]:
            assert choice["token_ids"] == expected_tokens(PROMPT, 2, choice["index"])
            np.testing.assert_array_equal(rows_of(choice["routed_experts"]), expected_rows(0, 11, description()))
        for start in (-1, 11, 2**127):
            status, answer = await cluster.post(body_of(routed_experts_prompt_start=start), SKYRL)
            assert (status, answer["error"]["param"]) == (400, "routed_experts_prompt_start")


@pytest.mark.parametrize(("largest", "dtype"), [(255, "uint8"), (256, "int16"), (32767, "int16"), (32768, "int32")])
def test_dtypes_at_their_limits(largest: int, dtype: str) -> None:
    rows = Rows(RoutingLayout(1, 2, 70_000), 1, (struct.pack("<2i", 0, largest),))
    payload = format_rows(rows, 5, "skyrl")
    assert isinstance(payload, RoutedExperts)
    assert (payload.dtype, payload.shape, payload.start) == (dtype, [1, 1, 2], 5)
    np.testing.assert_array_equal(rows_of(msgspec.to_builtins(payload)), [[[0, largest]]])
