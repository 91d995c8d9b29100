"""Messages of every size between the parts: nothing breaks at 128 KB, 4 MiB or the configured limit."""

import io
import json

import grpc
import numpy as np
import pytest

from common.errors import HandoffError, InvalidRequestError
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from common.routing.codec import base642numpy
from common.rpc import channel_options, grpc_errors
from tests.e2e.cluster import Answer, JsonObject, decode_rows
from tests.fakes.fake_workers import Script, description, expected_rows
from tests.integration.kit import fake_kit
from tests.integration.relay import WorkerPlan, running_relay
from tests.unit.router.cluster import GENERATE, choice_events, parse_events, running

#: 48 layers × 8 experts: a row is 384 bytes, exactly 512 characters of base64.
BIG = description(num_layers=48, top_k=8, num_experts=128, max_model_len=20_000)
ROW_CHARACTERS = 512
#: gRPC's own limit for one received message.
GRPC_DEFAULT_BYTES = 4 * 2**20


@pytest.mark.parametrize("line_kb", [127, 129, 513, 1000, 5000])
@pytest.mark.parametrize("mode", ["final", "delta"])
async def test_long_lines_reach_the_client_whole(line_kb: int, mode: str) -> None:
    """NVIDIA/TensorRT-LLM#13952, sgl-project/sglang#7301, aio-libs/aiohttp#4453.

    The worker's hop is gRPC, so the only lines are the router's own: with `final`, and with `delta` for a client that
    asks for events as large, one line carries all rows.
    """
    # The base64 of the header, whose 128 bytes are 171 characters, and of the JSON around: less than one row.
    num_rows = line_kb * 1024 // ROW_CHARACTERS
    prompt = [i % 300 for i in range(num_rows)]
    options = {"routed_experts": mode, "max_event_bytes": 8 * 2**20}
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}, "stream_options": options}
    async with running(Script(BIG)) as cluster:
        raw = await cluster.stream(body)
    assert 0 <= len(raw[0]) - num_rows * ROW_CHARACTERS < 1024
    [choice] = choice_events(parse_events(raw))
    rows = decode_rows(choice["routed_experts"])
    assert rows.tobytes() == expected_rows(0, num_rows, BIG).tobytes()


async def test_requests_and_replies_beyond_grpcs_default() -> None:
    """grpc.io#1254: 1.5 million token ids on the way in, 12,000 rows in one message on the way out."""
    long = description(vocab_size=50_000, max_model_len=2**21, num_layers=1, top_k=1)
    async with running(Script(long)) as cluster:
        prompt = [40_000] * 1_500_000
        raw = json.dumps({"token_ids": prompt, "sampling_params": {"max_tokens": 1}}).encode()
        async with cluster.http.post(GENERATE, data=io.BytesIO(raw)) as response:
            assert response.status == 200
        [request] = cluster.decode[0].decode_requests
        assert request.ByteSize() > GRPC_DEFAULT_BYTES
    async with running(Script(BIG)) as cluster:
        prompt = [i % 300 for i in range(12_000)]
        answer = await cluster.generate(prompt, max_tokens=1)
        rows = base642numpy(answer["choices"][0]["routed_experts"])
        assert rows.nbytes > GRPC_DEFAULT_BYTES
        np.testing.assert_array_equal(rows, expected_rows(0, 12_000, BIG))


async def test_real_workers_take_more_than_grpcs_default() -> None:
    """grpc.io#1254: both services read such a request, and refuse it for its content, not for its size.

    Their replies never come near: rows leave in messages of 1 MiB at most, and P's reply carries no array.
    """
    fields: JsonObject = {
        "request_id": "big",
        "token_ids": [7] * 5_000_000,
        "sampling": types_pb2.SamplingParams(max_tokens=1, top_p=1, n=1, repetition_penalty=1),
    }
    worker, options = WorkerPlan(fake_kit()), channel_options(64 * 2**20)
    async with running_relay(worker, worker) as relay:
        async with grpc.aio.insecure_channel(relay.decode.address, options=options) as channel:
            generate = decode_pb2_grpc.DecodeStub(channel).Generate(decode_pb2.GenerateRequest(**fields))
            with pytest.raises(InvalidRequestError, match="exceed the context"), grpc_errors():
                await generate.read()
        async with grpc.aio.insecure_channel(relay.prefiller.address, options=options) as channel:
            lease = prefill_pb2.Lease(endpoint="memory://nobody", timeout_s=1)
            with pytest.raises(HandoffError), grpc_errors():
                await prefill_pb2_grpc.PrefillStub(channel).Prefill(prefill_pb2.PrefillRequest(lease=lease, **fields))
        await relay.assert_baseline()


LIMIT = 3_000


def assert_too_large(answer: Answer) -> None:
    assert (answer.status, answer.token_ids) == (413, [])
    assert answer.error is not None
    assert answer.error["type"] == "RequestTooLargeError"


@pytest.mark.parametrize("small", ["router", "decode", "prefill"])
@pytest.mark.parametrize("stream", [False, True])
async def test_just_below_and_just_above_the_limit(small: str, stream: bool) -> None:
    """grpc.io#1254: below --max-message-bytes an answer, above it a typed error and no hang, whoever has the limit."""
    kit = fake_kit(max_model_len=8192)
    limits = {"router": 64 * 2**20, "decode": 64 * 2**20, "prefill": 64 * 2**20} | {small: LIMIT}
    decode = WorkerPlan(kit, num_blocks=4096, chunk=4096, max_message_bytes=limits["decode"])
    prefill = WorkerPlan(kit, num_blocks=4096, chunk=4096, max_message_bytes=limits["prefill"])
    async with running_relay(decode, prefill, max_message_bytes=limits["router"]) as relay:
        fields: JsonObject = {"max_tokens": 2, "stream": stream, "return_routed_experts": False}
        # A token id below 128 is one byte; what is around them takes less than 200.
        fits = await relay.client.generate([7] * (LIMIT - 200), **fields)
        assert fits.status == 200
        refused = await relay.client.generate([7] * (LIMIT + 1), **fields)
        assert_too_large(refused)
        if small != "prefill":  # rows of 4 bytes each, on their way back
            refused = await relay.client.generate([7] * (LIMIT - 200), max_tokens=2, stream=stream)
            assert_too_large(refused)
        canary = await relay.client.generate([5, 6, 7], max_tokens=4)
        assert len(canary.rows) == 3 + len(canary.token_ids) - 1
        await relay.assert_baseline()
