"""What POST /inference/v1/generate does beside tokens and rows: stop strings, prompt logprobs, masks, row forms."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest

from common.routing.codec import base642numpy
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import (
    GENERATE,
    Cluster,
    choice_events,
    joined_rows,
    joined_tokens,
    parse_events,
    running,
)
from tests.unit.router.text import checkpoints

PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 110]
VOCAB = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return checkpoints.write(folder, checkpoints.byte_level(VOCAB), dict(checkpoints.BYTE_LEVEL_SETTINGS))


def text_of(token_ids: list[int]) -> str:
    text: str = checkpoints.byte_level(VOCAB).decode(token_ids)
    return text


def first_ascii(tokens: list[int], after: int) -> tuple[int, str]:
    """Index and text of the first token from `after` on that is printable ASCII and new."""
    for at in range(after, len(tokens)):
        text = text_of([tokens[at]])
        if text.isascii() and text.isprintable() and text.strip() and text not in text_of(tokens[:at]):
            return at, text
    raise AssertionError("the fake's tokens have no such text; take another prompt")


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64])
async def test_a_stop_string_ends_the_choice_at_the_token_that_completes_it(model: Path, chunk_tokens: int) -> None:
    tokens = expected_tokens(PROMPT, 60)
    at, stop = first_ascii(tokens, 5)
    sampling = {"max_tokens": 60, "ignore_eos": True, "stop": [stop], "logprobs": 0}
    async with running(Script(chunk_tokens=chunk_tokens), model=str(model)) as cluster:
        whole = await cluster.generate(PROMPT, **sampling)
        body = {"token_ids": PROMPT, "sampling_params": sampling, "stream_options": {"include_usage": True}}
        events = parse_events(await cluster.stream(body))
        await cluster.decode[0].wait_until(lambda: not cluster.decode[0].live)
    (choice,) = whole["choices"]
    assert choice["token_ids"] == tokens[: at + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(choice["logprobs"]["content"]) == at + 1
    assert whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == at + 1
    rows = base642numpy(choice["routed_experts"])
    np.testing.assert_array_equal(rows, expected_rows(0, 10 + at, description()))
    streamed = choice_events(events)
    assert joined_tokens(streamed) == tokens[: at + 1]
    np.testing.assert_array_equal(joined_rows(streamed), rows)
    assert [c["finish_reason"] for c in streamed if c["finish_reason"]] == ["stop"]


async def test_a_stop_string_counts_only_after_min_tokens(model: Path) -> None:
    tokens = expected_tokens(PROMPT, 60)
    at, stop = first_ascii(tokens, 5)
    async with running(model=str(model)) as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=at + 4, min_tokens=at + 1, ignore_eos=True, stop=stop)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["token_ids"]) == at + 4


async def test_of_two_choices_only_the_stopped_one_is_dropped(model: Path) -> None:
    """Choice 1's tokens are one higher than choice 0's, so the stop string of one is another's at another place."""
    tokens = expected_tokens(PROMPT, 40)
    at, stop = first_ascii(tokens, 5)
    other = text_of(expected_tokens(PROMPT, 40, choice=1))
    stopped = {0: at + 1, 1: len(expected_tokens(PROMPT, 40))}
    if stop in other:
        pytest.skip("both choices contain the stop string")
    async with running(Script(chunk_tokens=2), model=str(model)) as cluster:
        answer = await cluster.generate(PROMPT, n=2, max_tokens=40, ignore_eos=True, stop=[stop])
        (request,) = cluster.decode[0].decode_requests
        assert cluster.decode[0].dropped == [(request.request_id, 0)]
    assert {c["index"]: len(c["token_ids"]) for c in answer["choices"]} == stopped
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length"]


async def test_all_choices_stopped_ends_the_calls(model: Path) -> None:
    tokens = expected_tokens(PROMPT, 40)
    at, stop = first_ascii(tokens, 5)
    script = Script(hold_after=at + 1)  # the worker would wait for ever after the token that completes it
    async with running(script, model=str(model)) as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=40, ignore_eos=True, stop=[stop])
        await cluster.decode[0].wait_until(lambda: not cluster.decode[0].live)
    assert answer["choices"][0]["stop_reason"] == stop


async def test_text_fields_without_a_tokenizer_are_refused() -> None:
    async with running() as cluster:
        for field, value in (("stop", "x"), ("bad_words", ["x"]), ("structured_outputs", {"regex": "a+"})):
            status, answer = await cluster.post({"token_ids": PROMPT, "sampling_params": {field: value}})
            assert (status, answer["error"]["param"]) == (400, field)
            assert "tokenizer" in answer["error"]["message"]
        await cluster.canary()


async def test_prompt_logprobs() -> None:
    async with running() as cluster:
        answer = await cluster.generate([7, 8, 9], max_tokens=1, prompt_logprobs=1)
        status, refused = await cluster.post(
            {"token_ids": [7, 8, 9], "sampling_params": {"prompt_logprobs": 1}, "stream": True}
        )
    # The fake's rule: position i has -i / 8, alternative 0 is id 0 with -i / 8.
    entry = {"logprob": -0.125, "rank": 1, "decoded_token": None}
    later = {"logprob": -0.25, "rank": 1, "decoded_token": None}
    assert answer["prompt_logprobs"] == [None, {"8": entry, "0": entry}, {"9": later, "0": later}]
    assert (status, refused["error"]["param"]) == (400, "prompt_logprobs")


async def test_sampling_mask() -> None:
    async with running() as cluster:
        answer = await cluster.generate(PROMPT, max_tokens=3, return_sampling_mask=True)
    assert answer["choices"][0]["sampling_mask"] == [[5], [12], [19]]


async def test_masks_of_a_request_are_bounded_together() -> None:
    async with running(max_mask_ids=60) as cluster:
        await cluster.generate(PROMPT, max_tokens=3, n=2, top_k=10, return_sampling_mask=True)
        for sampling in ({"max_tokens": 3, "n": 2, "top_k": 11}, {"max_tokens": 1}):  # 66 ids, and 300
            status, answer = await cluster.post(
                {"token_ids": PROMPT, "sampling_params": sampling | {"return_sampling_mask": True}}
            )
            assert (status, answer["error"]["param"]) == (400, "return_sampling_mask")
            assert "60" in answer["error"]["message"]


async def test_equal_prompts_of_one_request_are_sampled_apart() -> None:
    """Without a seed each prompt has its own; with one they share it, so that each can be repeated alone."""
    body = {"prompt": [PROMPT, PROMPT], "max_tokens": 1}
    async with running() as cluster:
        assert (await cluster.post(body, "/v1/completions"))[0] == 200
        assert (await cluster.post(body | {"seed": 5}, "/v1/completions"))[0] == 200
        first, second, *seeded = (request.sampling.seed for request in cluster.decode[0].decode_requests)
    assert first != second
    assert seeded == [5, 5]


@pytest.mark.parametrize("num_experts", [8, 257])
@pytest.mark.parametrize("by_server", [True, False])
async def test_rows_as_an_object(num_experts: int, by_server: bool) -> None:
    script = Script(description(num_experts=num_experts, routing_dtype="uint8" if num_experts == 8 else "uint16"))
    settings: dict[str, Any] = {"routed_experts_format": "dict"} if by_server else {}
    sampling = {"max_tokens": 4, "routed_experts_prompt_start": 3} | (
        {} if by_server else {"routed_experts_format": "dict"}
    )
    async with running(script, **settings) as cluster:
        raw = await _raw(cluster, {"token_ids": PROMPT, "sampling_params": sampling})
        events = parse_events(await cluster.stream({"token_ids": PROMPT, "sampling_params": sampling}))
    payload = json.loads(raw)["choices"][0]["routed_experts"]
    assert b'"routed_experts":{"data":"' in raw
    assert list(payload) == ["data", "shape", "dtype", "start"]
    assert (payload["shape"], payload["start"]) == ([10, 2, 2], 3)
    rows = _rows(payload)
    np.testing.assert_array_equal(rows, expected_rows(3, 13, script.model))
    pieces = [c["routed_experts"] for c in choice_events(events) if c["routed_experts"]]
    assert [p["start"] for p in pieces] == list(3 + np.cumsum([0, *(p["shape"][0] for p in pieces)])[:-1])
    np.testing.assert_array_equal(np.concatenate([_rows(p) for p in pieces]), rows)


async def _raw(cluster: Cluster, body: dict[str, Any]) -> bytes:
    async with cluster.http.post(GENERATE, json=body) as response:
        return await response.read()


def _rows(payload: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.generic]]:
    raw = pybase64.b64decode(payload["data"], validate=True)
    return np.frombuffer(raw, np.dtype(payload["dtype"]).newbyteorder("<")).reshape(payload["shape"])


async def test_bounds_name_field_value_and_bound() -> None:
    async with running(max_n=4, max_stop_strings=2, max_stop_chars=5, max_listed_tokens=3, max_logprobs=2) as cluster:
        for sampling, param, bound in (
            ({"n": 5}, "n", "4"),
            ({"logprobs": 3}, "logprobs", "2"),
            ({"logprobs": -1}, "logprobs", "2"),
            ({"prompt_logprobs": 3}, "prompt_logprobs", "2"),
            ({"stop": ["a", "b", "c"]}, "stop", "2"),
            ({"stop": "abcdef"}, "stop", "5"),
            ({"stop": [""]}, "stop", "empty"),
            ({"bad_words": ["a", "b", "c"]}, "bad_words", "2"),
            ({"logit_bias": {str(i): 0 for i in range(4)}}, "logit_bias", "3"),
            ({"allowed_token_ids": [1, 2, 3, 4]}, "allowed_token_ids", "3"),
            ({"allowed_token_ids": [300]}, "allowed_token_ids", "300"),
            ({"stop_token_ids": [1, 2, 3, 4]}, "stop_token_ids", "3"),
        ):
            status, answer = await cluster.post({"token_ids": PROMPT, "sampling_params": sampling})
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert bound in answer["error"]["message"]
        assert not cluster.decode[0].decode_requests
        await cluster.canary()
