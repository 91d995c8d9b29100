"""POST /inference/v1/generate without `stream`, over fake workers."""

import re
from typing import Any

import numpy as np
import pytest

from common.pb import decode_pb2
from common.routing.codec import base642numpy
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import running

PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 110]


async def test_answer_has_exactly_the_documented_fields() -> None:
    async with running() as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=3)
    assert list(answer) == [
        "request_id",
        "model",
        "created",
        "usage",
        "prompt_logprobs",
        "prompt_token_ids",
        "choices",
    ]
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "total_tokens": 13,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": None,
    }
    (choice,) = answer["choices"]
    routed_experts = choice.pop("routed_experts")
    assert base642numpy(routed_experts).shape == (12, 2, 2)
    assert choice == {
        "index": 0,
        # 605 % 300 = 5, then 7 more each time
        "token_ids": [5, 12, 19],
        "finish_reason": "length",
        "stop_reason": None,
        "logprobs": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "7", "start": 0, "end": 3}],
    }


@pytest.mark.parametrize("prompt_len", [1, 2, 15, 16, 17, 32, 33])
async def test_rows_are_p_plus_g_minus_1(prompt_len: int) -> None:
    prompt = list(range(3, 3 + prompt_len))
    async with running(Script(prompt_chunk=5, chunk_tokens=3)) as cluster:
        for max_tokens in (1, 2, 16):
            answer = await cluster.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
            rows = base642numpy(answer["choices"][0]["routed_experts"])
            np.testing.assert_array_equal(rows, expected_rows(0, prompt_len + max_tokens - 1, description()))


@pytest.mark.parametrize("start", [0, 1, 9, 10, None])
async def test_prompt_start_cuts_the_front(start: int | None) -> None:
    async with running(Script(prompt_chunk=3)) as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=4, routed_experts_prompt_start=start)
        only_token = await cluster.generate(PROMPT, max_tokens=1, routed_experts_prompt_start=start)
    rows = base642numpy(answer["choices"][0]["routed_experts"])
    np.testing.assert_array_equal(rows, expected_rows(start or 0, 13, description()))
    assert base642numpy(only_token["choices"][0]["routed_experts"]).shape == (10 - (start or 0), 2, 2)


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, "uint8"), (256, "uint8"), (257, "uint16"), (512, "uint16")])
async def test_dtype_is_the_models(num_experts: int, dtype: str) -> None:
    model = description(num_experts=num_experts, routing_dtype=dtype)
    async with running(Script(model)) as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=2)
    rows = base642numpy(answer["choices"][0]["routed_experts"])
    assert rows.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(rows, expected_rows(0, 11, model))


async def test_rows_off_for_one_request_and_for_a_server() -> None:
    async with running() as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=2, return_routed_experts=False)
        assert answer["choices"][0]["routed_experts"] is None
        assert [r.routing.enabled for r in cluster.decode[0].decode_requests] == [False]
    off = Script(description(routing_enabled=False))
    async with running(off, enable_return_routed_experts=False) as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=2, return_routed_experts=True)
        assert answer["choices"][0]["routed_experts"] is None


async def test_omitted_max_tokens_means_the_rest_of_the_context() -> None:
    async with running(Script(chunk_tokens=16)) as cluster:
        answer = await cluster.generate(PROMPT, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 118
        clamped = await cluster.generate(PROMPT * 12, max_tokens=50, ignore_eos=True)
        assert clamped["usage"]["completion_tokens"] == 8
        beyond = await cluster.generate(PROMPT * 12, max_tokens=2**63, ignore_eos=True)
        assert beyond["usage"]["completion_tokens"] == 8


async def test_logprobs() -> None:
    async with running() as cluster:
        answer = await cluster.generate([1, 1], max_tokens=2, logprobs=3)
        none = await cluster.generate([1, 1], max_tokens=2, logprobs=0)
    # The sampled token, 2 then 9, comes first; the alternatives are 0, 1, 2; a token never appears twice.
    own = {"logprob": -0.5, "rank": 2}
    others = {"logprob": -0.25, "rank": 1}
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {"token_id": 2, **own, "top_logprobs": [{"token_id": t, **(own if t == 2 else others)} for t in (2, 0, 1)]},
        ]
    }
    assert none["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == [{"token_id": 2, **own}]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), float("inf")])
async def test_logprobs_that_are_not_finite(logprob: float) -> None:
    async with running(Script(logprob=logprob)) as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=1, logprobs=0)
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_finish_reasons() -> None:
    async with running() as cluster:
        by_eos = (await cluster.generate([1, 1], max_tokens=9))["choices"][0]
        by_stop = (await cluster.generate(PROMPT, max_tokens=9, stop_token_ids=[19]))["choices"][0]
        ignored = (await cluster.generate([1, 1], max_tokens=9, ignore_eos=True))["choices"][0]
    assert (by_eos["token_ids"], by_eos["finish_reason"], by_eos["stop_reason"]) == ([2], "stop", None)
    assert (by_stop["token_ids"], by_stop["finish_reason"], by_stop["stop_reason"]) == ([5, 12, 19], "stop", 19)
    assert (len(ignored["token_ids"]), ignored["finish_reason"]) == (9, "length")


async def test_every_sampling_field_reaches_both_workers() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "seed": -(2**63),
        "stop_token_ids": [7, 4],
        "ignore_eos": True,
        "max_tokens": 4,
        "min_tokens": 3,
        "logprobs": 1,
        "logit_bias": {"299": -100, "0": 1.5},
        "routed_experts_prompt_start": 6,
        "detokenize": False,
        "skip_special_tokens": True,
    }
    async with running() as cluster:
        await cluster.generate(PROMPT, **fields)
        (decode,), (prefill,) = cluster.decode[0].decode_requests, cluster.prefill[0].prefill_requests
    assert decode.prefill_site == decode_pb2.PREFILL_SITE_REMOTE
    assert prefill.lease.transfer_id == 1
    for request in (decode, prefill):
        sampling = request.sampling
        assert list(request.token_ids) == PROMPT
        assert request.request_id == decode.request_id
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 5, 0.125)
        assert (sampling.seed, sampling.n) == (-(2**63), 1)
        assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (4, 3, 1)
        assert (list(sampling.stop_token_ids), sampling.ignore_eos) == ([4, 7], True)
        assert dict(sampling.logit_bias) == {299: -100.0, 0: 1.5}
        assert (request.routing.enabled, request.routing.start) == (True, 6)


async def test_neutral_defaults_and_a_drawn_seed() -> None:
    async with running() as cluster:
        for _ in range(2):
            await cluster.generate(PROMPT, max_tokens=1)
        first, second = (request.sampling for request in cluster.decode[0].decode_requests)
        assert (first.temperature, first.top_p, first.top_k, first.min_p) == (1, 1, 0, 0)
        assert not first.HasField("logprobs")
        assert first.seed != second.seed
        assert first.seed == cluster.prefill[0].prefill_requests[0].sampling.seed


async def test_several_choices() -> None:
    async with running(decode=2, prefill=2) as cluster:
        answer = await cluster.generate(PROMPT, n=3, max_tokens=4)
        decoded = [request for worker in cluster.decode for request in worker.decode_requests]
        prefilled = [request for worker in cluster.prefill for request in worker.prefill_requests]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert choice["token_ids"] == expected_tokens(PROMPT, 4, choice["index"])
        np.testing.assert_array_equal(base642numpy(choice["routed_experts"]), expected_rows(0, 13, description()))
    assert answer["usage"]["completion_tokens"] == 12
    (decoding,), (prefilling,) = decoded, prefilled
    assert re.fullmatch(f"{answer['request_id']}-0-[0-9a-f]{{8}}", decoding.request_id)
    assert (decoding.request_id, decoding.sampling) == (prefilling.request_id, prefilling.sampling)
    assert decoding.sampling.n == 3


async def test_both_workers_hear_the_cache_salt() -> None:
    async with running() as cluster:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
        for salt in ({}, {"cache_salt": None}, {"cache_salt": "pepper"}):
            await cluster.post(body | salt)
        asked = cluster.decode[0].decode_requests, cluster.prefill[0].prefill_requests
    for requests in asked:
        assert [request.cache_salt for request in requests] == ["", "", "pepper"]


async def test_role_both_needs_no_prefill_worker() -> None:
    async with running(both=True) as cluster:
        await cluster.canary()
        assert cluster.decode[0].decode_requests[0].prefill_site == decode_pb2.PREFILL_SITE_LOCAL


async def test_return_token_ids_and_ids_of_requests() -> None:
    async with running() as cluster:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "return_token_ids": True}
        _, answer = await cluster.post(body)
        assert answer["prompt_token_ids"] == PROMPT
        assert answer["request_id"].startswith("generate-tokens-")
        _, answer = await cluster.post(body | {"request_id": "mine"})
        assert answer["request_id"] == "mine"
        async with cluster.http.post(
            "/inference/v1/generate", json=body | {"request_id": "mine"}, headers={"X-Request-Id": "theirs"}
        ) as response:
            assert (await response.json())["request_id"] == response.headers["X-Request-Id"] == "theirs"
        assert cluster.decode[0].decode_requests[-1].request_id.startswith("theirs-0-")
