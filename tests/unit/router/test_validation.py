"""Every wrong request is a 400 in strict JSON that names the field, reaches no worker, and harms nobody."""

import io
import json
import time
from typing import Any

import pytest

from tests.fakes.fake_workers import Script, description
from tests.unit.router.cluster import GENERATE, Cluster, running, strict_json

PROMPT = list(range(10))
INT64 = 2**63


async def refused(cluster: Cluster, body: Any, param: str) -> None:
    status, answer = await cluster.post(body)
    assert (status, answer["error"]["type"]) == (400, "BadRequestError"), (body, answer)
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, 400)


async def accepted(cluster: Cluster, body: Any) -> None:
    status, answer = await cluster.post(body)
    assert status == 200, (body, answer)


def with_sampling(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2} | sampling}


BAD_SAMPLING: dict[str, list[Any]] = {
    "routed_experts_prompt_start": [11, -1, INT64, 2**70, "3", 1.5, True, [0]],
    "n": [0, -1, 129, 10**6, "1", 1.0, True],
    "seed": [INT64, 2**64, 10**20, -INT64 - 1, "1", 1.0, True],
    "max_tokens": [0, -1, -160, 1.5, "4", True],
    "min_tokens": [-1, 3, 1.5, "1", True],
    "temperature": [-1, -0.001, "nan", "1", True, [1]],
    "top_p": [0, 1.0001, -0.1, "1", True],
    "top_k": [-2, 2**31, 1.5, "1", True],
    "min_p": [-0.1, 1.1, "0", False],
    "logprobs": [-1, 21, 300, 301, 10**9, "1", 1.0, True],
    "logit_bias": [
        {"300": 1},
        {"-1": 1},
        {"AI": 1},
        {"1.0": 1},
        {"": 1},
        {"01": 1},
        {"٣": 1},
        {"9" * 5000: 1},
        {"1": 101},
        {"1": -100.5},
        {"1": "x"},
        {"1": True},
        {"1": None},
        [1],
    ],
    "stop_token_ids": [[300], [-1], [2**70], [1.5], ["1"], [True], [None], 5],
    "ignore_eos": [1, "true"],
    "return_routed_experts": [1, "no"],
    "presence_penalty": [3, -3, 2.001, "0", True],
    "frequency_penalty": [3, -3, "x"],
    "repetition_penalty": [0, -1, 2.1, "1"],
    "allowed_token_ids": [[300], ["1"], [-1], 5],
    "bad_words": [["x"], "x", [""], [5]],  # no tokenizer here
    "stop": ["x", ["x"], [""], "", 5, [None]],
    "include_stop_str_in_output": [1, "yes"],
    "prompt_logprobs": [-1, 21, "1", True],
    "structured_outputs": [{"json": {}}, {"regex": "("}, {"regex": "a", "choice": ["b"]}, "x"],
    "routed_experts_format": ["raw", 1],
    "return_sampling_mask": [1, "true"],
    "use_beam_search": [True],
    "truncate_prompt_tokens": [5],
    "logprob_token_ids": [[1]],
    "repetition_detection": [{"max_pattern_size": 2}],
    "thinking_token_budget": [10],
    "logits_processors": [["x"]],
    "extra_args": [{"x": 1}],
}

GOOD_SAMPLING: dict[str, list[Any]] = {
    "routed_experts_prompt_start": [0, 10, None],
    "n": [1, None],
    "seed": [-1, 0, INT64 - 1, -INT64, None],
    "max_tokens": [2**31, INT64, 2**70],
    "min_tokens": [0, 2, None],
    "temperature": [0, 0.0, 2, 1e30, None],
    "top_p": [1, 1e-9, None],
    "top_k": [-1, 0, 1, 300, 2**31 - 1, None],
    "min_p": [0, 1, None],
    "logprobs": [0, 1, 20, None],
    "logit_bias": [{}, {"299": 100, "0": -100}, None],
    "stop_token_ids": [[], [0, 299], None],
    "ignore_eos": [True, None],
    "return_routed_experts": [True, None],
    "presence_penalty": [0, 0.5, -2, 2, None],
    "frequency_penalty": [0.0, 0.5, -2, 2, None],
    "repetition_penalty": [1, 1.0, 1.1, 0.01, 2, None],
    "allowed_token_ids": [[], [299], None],
    "bad_words": [[], None],
    "stop": [[], None],
    "include_stop_str_in_output": [True, False, None],
    "prompt_logprobs": [0, 1, 20, None],
    "structured_outputs": [{}, {"json": None}, None],
    "routed_experts_format": ["npy", "dict", None],
    "return_sampling_mask": [True, False, None],
    "detokenize": [True, False, None],
    "skip_special_tokens": [True, False, None],
    "logits_processors": [[], None],
    "extra_args": [{}, None],
    "use_beam_search": [False, None],
    "a_field_nobody_knows": [1, {"x": [2]}, None],
}


async def test_bad_sampling_parameters() -> None:
    async with running() as cluster:
        for name, values in BAD_SAMPLING.items():
            for value in values:
                await refused(cluster, with_sampling(**{name: value}), name)
        assert cluster.decode[0].decode_requests == []
        await cluster.canary()


async def test_min_tokens_that_cannot_be_reached() -> None:
    """Stop ids and end-of-sequence ids (here 2) are not sampled before `min_tokens`."""
    every_other = [i for i in range(300) if i != 2]
    async with running() as cluster:
        for stop in (list(range(300)), every_other):
            await refused(cluster, with_sampling(min_tokens=1, stop_token_ids=stop), "min_tokens")
            await refused(cluster, with_sampling(min_tokens=1, stop_token_ids=stop, ignore_eos=True), "min_tokens")
        assert cluster.decode[0].decode_requests == []
        await accepted(cluster, with_sampling(min_tokens=0, stop_token_ids=list(range(300))))
        await accepted(cluster, with_sampling(min_tokens=1, stop_token_ids=every_other[:-1]))


async def test_good_sampling_parameters() -> None:
    async with running(Script(chunk_tokens=200)) as cluster:
        for name, values in GOOD_SAMPLING.items():
            for value in values:
                await accepted(cluster, with_sampling(**{name: value}))


async def test_bad_prompts() -> None:
    bad: list[Any] = [[], [300], [-1], [2**31], [INT64], [2**70], [5, 300], [1.5], ["5"], [True], [None], [[5]]]
    async with running() as cluster:
        for token_ids in [*bad, None, "5", 5, {"0": 1}]:
            await refused(cluster, {"token_ids": token_ids, "sampling_params": {"max_tokens": 1}}, "token_ids")
        await refused(cluster, {"sampling_params": {}}, "token_ids")
        assert cluster.decode[0].decode_requests == []
        await accepted(cluster, {"token_ids": [299, 0], "sampling_params": {"max_tokens": 1}})
        await cluster.canary()


async def test_prompts_that_do_not_fit_name_both_numbers() -> None:
    async with running() as cluster:
        await accepted(cluster, {"token_ids": [7] * 127, "sampling_params": {"max_tokens": 1}})
        for prompt_len in (128, 129, 500):
            body = {"token_ids": [7] * prompt_len, "sampling_params": {"max_tokens": 1}}
            await refused(cluster, body, "token_ids")
            _, answer = await cluster.post(body)
            assert f"{prompt_len} tokens" in answer["error"]["message"]
            assert "128" in answer["error"]["message"]


BAD_TOP_LEVEL: dict[str, list[Any]] = {
    "sampling_params": [None, [], "x"],
    "stream": [1, "true"],
    "return_token_ids": [1],
    "request_id": ["", "x" * 257, "a b", "a\nb", "é", 5],
    "kv_transfer_params": [{"x": 1}, "x"],
    "cache_salt": ["", 5],
    "priority": ["1", 1.5],
    "stream_options": [5, []],
}
BAD_OPTIONS = {"routed_experts": "some", "max_event_bytes": 1023, "include_usage": 1}
GOOD_TOP_LEVEL = {"kv_transfer_params": {}, "cache_salt": "s", "priority": 3, "model": None, "x": 1}


async def test_top_level_fields() -> None:
    good = with_sampling()
    async with running() as cluster:
        for name, values in BAD_TOP_LEVEL.items():
            for value in values:
                await refused(cluster, good | {name: value}, name)
        for name, value in BAD_OPTIONS.items():
            await refused(cluster, good | {"stream": True, "stream_options": {name: value}}, name)
        for name, value in GOOD_TOP_LEVEL.items():
            await accepted(cluster, good | {name: value})
        await cluster.canary()


async def test_wrong_request_is_plain_http_also_when_streaming() -> None:
    body = with_sampling(n=0) | {"stream": True}
    async with running() as cluster, cluster.http.post(GENERATE, json=body) as response:
        assert (response.status, response.content_type) == (400, "application/json")
        assert (await response.json())["error"]["param"] == "n"


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"nan"']


@pytest.mark.parametrize("number", NUMBERS)
async def test_numbers_that_are_none(number: str) -> None:
    async with running() as cluster:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "unknown", "seed"):
            body = f'{{"token_ids": [1], "sampling_params": {{"{name}": {number}}}}}'
            status, answer = await raw_post(cluster, body.encode())
            if name == "unknown" and number == '"nan"':
                assert status == 200
            else:
                assert status == 400, (name, answer)
        body = f'{{"token_ids": [1], "sampling_params": {{"logit_bias": {{"1": {number}}}}}}}'
        assert (await raw_post(cluster, body.encode()))[0] == 400
        await cluster.canary()


MALFORMED = [
    b"",
    b"{",
    b"[1,2",
    b"null",
    b"[]",
    b'"x"',
    b"5",
    b"\xff\xfe",
    b'{"a": "\xff"}',
    b"{'a': 1}",
    b"[" * 200_000,
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
async def test_bodies_that_are_no_json_object(body: bytes) -> None:
    async with running() as cluster:
        status, answer = await raw_post(cluster, body)
        assert (status, answer["error"]["type"]) == (400, "BadRequestError")
        await cluster.canary()


async def raw_post(cluster: Cluster, body: bytes) -> tuple[int, Any]:
    async with cluster.http.post(GENERATE, data=body) as response:
        assert response.content_type == "application/json"
        return response.status, strict_json(await response.text())


async def test_large_prompts_are_checked_fast() -> None:
    """128k ids, with an error at the very end; a second of a processor is generous for what takes some 30 ms."""
    body = json.dumps({"token_ids": [7] * 131_072 + [300], "sampling_params": {"max_tokens": 1}}).encode()
    async with running(Script(description(max_model_len=200_000))) as cluster:
        began = time.process_time()
        status, answer = await raw_post(cluster, body)
        assert time.process_time() - began < 1
        assert (status, answer["error"]["param"]) == (400, "token_ids")
        many_errors = json.dumps({"token_ids": ["x"] * 131_072, "sampling_params": {}}).encode()
        status, answer = await raw_post(cluster, many_errors)
        assert status == 400
        assert len(answer["error"]["message"]) < 200


async def test_large_prompts_pass_grpcs_own_limit() -> None:
    """1.5 million ids are 4.5 MB of varints, above the 4 MiB that gRPC allows by default."""
    prompt = [40_000] * 1_500_000
    model = description(vocab_size=50_000, max_model_len=2**21, num_layers=1, top_k=1)
    async with running(Script(model, prompt_chunk=0)) as cluster:
        body = json.dumps({"token_ids": prompt, "sampling_params": {"max_tokens": 1}}).encode()
        async with cluster.http.post(GENERATE, data=io.BytesIO(body)) as response:
            answer = await response.json()
        assert answer["usage"]["prompt_tokens"] == 1_500_000
        assert len(cluster.prefill[0].prefill_requests[0].token_ids) == 1_500_000


async def test_unknown_fields_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    async with running() as cluster:
        for _ in range(3):
            await accepted(cluster, with_sampling(strange_new_field=1) | {"another_one": 2})
    logged = capsys.readouterr().out
    assert logged.count("strange_new_field") == 1
    assert logged.count("another_one") == 1
