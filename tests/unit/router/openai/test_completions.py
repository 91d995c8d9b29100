"""POST /v1/completions without `stream`, over fake workers."""

import json
from pathlib import Path

import numpy as np
import pytest

from common.pb import types_pb2
from common.routing.codec import base642numpy
from router.openai.responses import CompletionResponse
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import running
from tests.unit.router.openai.vocabulary import COMPLETIONS, ids, said


async def test_text_in_text_out(model: str) -> None:
    prompt = [0, *ids("hello")]
    async with running(model=model) as cluster:
        status, answer = await cluster.post({"prompt": "hello", "max_tokens": 5}, COMPLETIONS)
        (asked,) = cluster.decode[0].decode_requests
    assert status == 200
    CompletionResponse.model_validate_json(json.dumps(answer))
    assert list(asked.token_ids) == prompt
    created = answer.pop("created")
    assert isinstance(created, int)
    assert answer.pop("id").startswith("cmpl-")
    rows = answer["choices"][0].pop("routed_experts")
    np.testing.assert_array_equal(base642numpy(rows), expected_rows(0, 6 + 5 - 1, description()))
    assert answer == {
        "object": "text_completion",
        "model": Path(model).name,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": 6,
            "total_tokens": 11,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": None,
        },
        "choices": [
            {
                "index": 0,
                "text": said(expected_tokens(prompt, 5)),
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "prompt_token_ids": None,
                "prompt_logprobs": None,
                "sampling_mask": None,
                "weight_versions": [{"version": "7", "start": 0, "end": 5}],
            }
        ],
    }


async def test_special_tokens_are_added_to_texts_unless_told_not_to(model: str) -> None:
    async with running(model=model) as cluster:
        await cluster.post({"prompt": "a", "max_tokens": 1, "add_special_tokens": False}, COMPLETIONS)
        await cluster.post({"prompt": [5, 6], "max_tokens": 1}, COMPLETIONS)
        asked = [list(request.token_ids) for request in cluster.decode[0].decode_requests]
    assert asked == [ids("a"), [5, 6]]


@pytest.mark.parametrize("prompts", [["one", "three"], [[5, 6], [7, 8, 9]]])
async def test_several_prompts_with_several_choices_each(model: str, prompts: list[str] | list[list[int]]) -> None:
    body = {"prompt": prompts, "n": 2, "max_tokens": 3, "return_token_ids": True}
    async with running(model=model) as cluster:
        _, answer = await cluster.post(body, COMPLETIONS)
    encoded = [[0, *ids(each)] if isinstance(each, str) else each for each in prompts]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        prompt = encoded[choice["index"] // 2]
        tokens = expected_tokens(prompt, 3, choice=choice["index"] % 2)
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == tokens
        assert choice["text"] == said(tokens)
        assert base642numpy(choice["routed_experts"]).shape == (len(prompt) + 2, 2, 2)
    total = sum(map(len, encoded))
    assert answer["usage"]["prompt_tokens"] == total
    assert answer["usage"]["completion_tokens"] == 12


async def test_every_field_reaches_the_workers(model: str) -> None:
    body = {
        "prompt": [9],
        "max_tokens": 7,
        "min_tokens": 2,
        "n": 2,
        "best_of": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "seed": -5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"12": 1.5},
        "allowed_token_ids": [11, 12],
        "bad_words": ["b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": 2,
        "return_sampling_mask": True,
        "priority": 4,
        "cache_salt": "pepper",
        "routed_experts_prompt_start": 1,
        "kv_transfer_params": {},
    }
    async with running(model=model) as cluster:
        status, answer = await cluster.post(body, COMPLETIONS)
        (asked,) = cluster.decode[0].decode_requests
    assert status == 200, answer
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n, sampling.seed) == (7, 2, 2, -5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert dict(sampling.logit_bias) == {12: 1.5}
    assert sorted(sampling.allowed_token_ids) == [11, 12]
    assert [list(word.ids) for word in sampling.bad_words] == [ids("b")]
    assert (list(sampling.stop_token_ids), sampling.ignore_eos, sampling.logprobs) == ([3], True, 2)
    assert sampling.sampling_mask
    assert (asked.priority, asked.cache_salt) == (4, "pepper")
    assert asked.routing == types_pb2.RoutingParams(enabled=True, start=1)


async def test_max_tokens_left_out_is_the_rest_of_the_context(model: str) -> None:
    """Case 8: no default of 16."""
    async with running(model=model) as cluster:
        _, answer = await cluster.post({"prompt": [5] * 10, "ignore_eos": True}, COMPLETIONS)
    assert answer["usage"]["completion_tokens"] == 118


async def test_one_token_is_one_token(model: str) -> None:
    """Case 4."""
    async with running(model=model) as cluster:
        _, answer = await cluster.post({"prompt": [100], "max_tokens": 1, "return_token_ids": True}, COMPLETIONS)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == ([100], "h", "length")
    assert base642numpy(choice["routed_experts"]).shape == (1, 2, 2)


@pytest.mark.parametrize(
    ("extra", "text", "num_tokens", "reason", "stop_reason"),
    [
        ({"stop": "END"}, "hé", 5, "stop", "END"),
        ({"stop": ["xyz", "END"], "include_stop_str_in_output": True}, "héEND", 5, "stop", "END"),
        ({"stop": "h"}, "", 1, "stop", "h"),
        ({"stop": "ENT", "max_tokens": 9}, "héEND!ENx?", 9, "length", None),
        ({"stop_token_ids": [135]}, "héEND", 6, "stop", 135),
        ({"max_tokens": 2}, "h\N{REPLACEMENT CHARACTER}", 2, "length", None),
        ({"max_tokens": 7, "stop": "ENT"}, "héEND!EN", 7, "length", None),
    ],
)
async def test_ends(
    model: str, extra: dict[str, object], text: str, num_tokens: int, reason: str, stop_reason: str | int | None
) -> None:
    """Cases 34, 35, 59 and 61: text is cut, while ids, logprobs and rows keep the token that completes the match."""
    body = {"prompt": [100], "return_token_ids": True, "logprobs": 0, **extra}
    async with running(Script(chunk_tokens=4), model=model) as cluster:
        _, answer = await cluster.post(body, COMPLETIONS)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop_reason)
    assert choice["token_ids"] == expected_tokens([100], num_tokens)
    assert len(choice["logprobs"]["tokens"]) == num_tokens
    assert base642numpy(choice["routed_experts"]).shape == (num_tokens, 2, 2)
    assert answer["usage"]["completion_tokens"] == num_tokens


async def test_special_tokens_are_shown_only_on_request(model: str) -> None:
    """The prompt's sum is 300 + 2 - 7: token 0 is 295, token 1 is the end of sequence, which is a stop, too."""
    texts = []
    async with running(model=model) as cluster:
        for skip, include in ((True, True), (False, False), (False, True)):
            body = {"prompt": [295], "max_tokens": 2, "skip_special_tokens": skip}
            body["include_stop_str_in_output"] = include
            _, answer = await cluster.post(body, COMPLETIONS)
            assert answer["choices"][0]["finish_reason"] == "stop"
            texts.append(answer["choices"][0]["text"])
    assert texts == [said([295]), said([295]), said([295]) + "<|im_end|>"]


async def test_logprobs_are_four_lists(model: str) -> None:
    async with running(model=model) as cluster:
        _, answer = await cluster.post({"prompt": [100], "max_tokens": 3, "logprobs": 2}, COMPLETIONS)
    replacement = "\N{REPLACEMENT CHARACTER}"
    alternatives = {"<|bos|>": -0.25, "<|im_start|>": -0.25}
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["h", replacement, replacement],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"h": -0.5} | alternatives, *[{replacement: -0.5} | alternatives] * 2],
        "text_offset": [0, 1, 2],
    }


async def test_tokens_in_logprobs_as_ids(model: str) -> None:
    body = {"prompt": [100], "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    async with running(model=model) as cluster:
        _, answer = await cluster.post(body, COMPLETIONS)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:100", "token_id:107"]
    assert logprobs["top_logprobs"][0] == {"token_id:100": -0.5, "token_id:0": -0.25}


async def test_minus_infinity_has_a_number(model: str) -> None:
    async with running(Script(logprob=float("-inf")), model=model) as cluster:
        _, answer = await cluster.post({"prompt": [100], "max_tokens": 1, "logprobs": 0}, COMPLETIONS)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_echo_puts_the_prompt_in_front(model: str) -> None:
    """A text as it was sent, without the special token; ids as they decode."""
    async with running(model=model) as cluster:
        _, sent = await cluster.post({"prompt": "hé", "max_tokens": 2, "echo": True}, COMPLETIONS)
        _, decoded = await cluster.post({"prompt": [0, *ids("hé")], "max_tokens": 2, "echo": True}, COMPLETIONS)
    expected = "hé" + said(expected_tokens([0, *ids("hé")], 2))
    assert sent["choices"][0]["text"] == expected
    assert decoded["choices"][0]["text"] == expected
    assert sent["usage"]["completion_tokens"] == 2


async def test_echo_with_logprobs_shows_those_of_the_prompt(model: str) -> None:
    """The fakes give position i of a prompt the logprob -i / 8, and alternative k the logprob -(i + k) / 8."""
    prompt = [*ids("abc"), (100 - sum(ids("abc"))) % 300]
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 2}
    async with running(model=model) as cluster:
        _, answer = await cluster.post(body, COMPLETIONS)
        (asked,) = cluster.prefill[0].prefill_requests
    assert asked.sampling.prompt_logprobs == 2
    (choice,) = answer["choices"]
    words = [said([token]) for token in prompt]
    assert choice["logprobs"] == {
        "tokens": [*words, "h"],
        "token_logprobs": [None, -0.125, -0.25, -0.375, -0.5],
        "top_logprobs": [
            None,
            {words[1]: -0.125, "<|bos|>": -0.125},
            {words[2]: -0.25, "<|bos|>": -0.25},
            {words[3]: -0.375, "<|bos|>": -0.375},
            {"h": -0.5, "<|bos|>": -0.25},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        str(prompt[1]): {"logprob": -0.125, "rank": 1, "decoded_token": words[1]},
        "0": {"logprob": -0.125, "rank": 1, "decoded_token": "<|bos|>"},
        "1": {"logprob": -0.25, "rank": 2, "decoded_token": "<|im_start|>"},
    }


async def test_no_tokens_but_the_prompts(model: str) -> None:
    """Case 23: `max_tokens` 0 with echo has p rows, and no token of its own."""
    prompt = ids("abcd")
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    async with running(model=model) as cluster:
        status, answer = await cluster.post(body, COMPLETIONS)
        await cluster.canary()
    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("abcd", [], "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.125, -0.25, -0.375]
    np.testing.assert_array_equal(base642numpy(choice["routed_experts"]), expected_rows(0, 4, description()))
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 4


async def test_rows_as_an_object_or_not_at_all(model: str) -> None:
    async with running(model=model) as cluster:
        body = {"prompt": [5, 6], "max_tokens": 1, "routed_experts_format": "dict", "routed_experts_prompt_start": 1}
        _, as_object = await cluster.post(body, COMPLETIONS)
        body = {"prompt": [5, 6], "max_tokens": 1, "return_routed_experts": False}
        _, without = await cluster.post(body, COMPLETIONS)
    rows = as_object["choices"][0]["routed_experts"]
    assert (rows["shape"], rows["dtype"], rows["start"]) == ([1, 2, 2], "uint8", 1)
    assert without["choices"][0]["routed_experts"] is None


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}},
            {"type": "integer"},
        ),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, {"type": "boolean"}),
    ],
)
async def test_schemas_reach_the_workers_as_grammars(
    model: str, given: dict[str, object], schema: dict[str, object]
) -> None:
    async with running(model=model) as cluster:
        status, answer = await cluster.post({"prompt": [5], "max_tokens": 1, **given}, COMPLETIONS)
        assert status == 200, answer
        grammars = [
            cluster.decode[0].decode_requests[0].sampling.grammar,
            cluster.prefill[0].prefill_requests[0].sampling.grammar,
        ]
    assert [json.loads(grammar) for grammar in grammars] == [{"grammars": [{"json_schema": schema}]}] * 2


async def test_format_text_asks_for_nothing(model: str) -> None:
    async with running(model=model) as cluster:
        body = {"prompt": [5], "max_tokens": 1, "response_format": {"type": "text"}}
        status, _ = await cluster.post(body, COMPLETIONS)
        assert not cluster.decode[0].decode_requests[0].sampling.HasField("grammar")
    assert status == 200


async def test_a_text_that_cannot_fit_is_refused_by_its_tokens(model: str) -> None:
    async with running(model=model) as cluster:
        status, answer = await cluster.post({"prompt": "a" * 1000}, COMPLETIONS)
    assert status == 400
    assert "1001" in answer["error"]["message"]
    assert "127" in answer["error"]["message"]
    assert answer["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a" * 1537}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "a" * 1537]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1537}]}, "messages"),
        ("/generate", {"text": "a" * 1537}, "text"),
    ],
)
async def test_a_text_beyond_any_tokens_is_refused_by_its_length(
    model: str, path: str, body: dict[str, object], param: str
) -> None:
    """The longest token is <|im_start|>, with 12 characters; 12 * 128 = 1536."""
    async with running(model=model) as cluster:
        status, answer = await cluster.post(body, path)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "1536" in answer["error"]["message"]
    assert "characters" in answer["error"]["message"]


async def test_ids_need_no_tokenizer() -> None:
    async with running() as cluster:
        body = {"prompt": [100], "max_tokens": 2, "return_token_ids": True, "logprobs": 0, "echo": True}
        status, answer = await cluster.post(body, COMPLETIONS)
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [100, 107])
        assert choice["logprobs"]["tokens"] == ["token_id:100", "token_id:100", "token_id:107"]
        status, answer = await cluster.post({"prompt": "hello"}, COMPLETIONS)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "tokenizer" in answer["error"]["message"]


async def test_the_clients_id_is_the_answers(model: str) -> None:
    async with running(model=model) as cluster:
        body = {"prompt": [5], "max_tokens": 1}
        _, by_field = await cluster.post(body | {"request_id": "mine"}, COMPLETIONS)
        _, by_header = await cluster.post(body, COMPLETIONS, headers={"X-Request-Id": "yours"})
    assert (by_field["id"], by_header["id"]) == ("mine", "yours")
