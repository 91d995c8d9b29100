"""A real cluster behind every endpoint. Numbers in docstrings refer to public reports of the same fault."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from common.engine.solo import SoloRunner
from common.sampling import SamplingParams
from router.text.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.cluster import UNTIL_S, Client, JsonObject, sse_events
from tests.e2e.oracle import assert_equals_solo
from tests.e2e.test_routing_rows import prompt_of
from tests.endpoints import CHAT, COMPLETIONS, ENDPOINTS, SGLANG, Endpoint, Said
from tests.hostile import HOSTILE, HUGE, NO_MESSAGES, NO_NUMBERS, NO_PROMPTS, NUMBERS

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("disaggregated")]

each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=repr)
text_endpoints = pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT, SGLANG], ids=repr)

CUT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Any) -> Tokenizer:
    found = load_tokenizer(tiny_model)
    assert found is not None
    return found


async def ask(client: Client, endpoint: Endpoint, body: JsonObject) -> Said:
    """The only choice of an answer."""
    async with client.session.post(client.url + endpoint.path, json=body) as response:
        assert response.status == 200, await response.text()
        if body["stream"]:
            *events, done = [event async for event in sse_events(response)]
            assert done == "[DONE]"
            return endpoint.read([json.loads(event) for event in events])[0]
        return endpoint.read([json.loads(await response.text())])[0]


async def prompt_ids(client: Client, endpoint: Endpoint, prompt: list[int]) -> list[int]:
    """What the endpoint makes of `prompt`, or of the message "a"."""
    if endpoint is not CHAT:
        return prompt
    body = {"messages": [{"role": "user", "content": "a"}]}
    async with client.session.post(f"{client.url}/tokenize", json=body) as response:
        tokens: list[int] = (await response.json())["tokens"]
        return tokens


def hostile_requests(endpoint: Endpoint) -> dict[str, list[bytes]]:
    """By the field that is wrong."""
    found: dict[str, list[bytes]] = {}
    for name, values in HOSTILE.items():
        sampling: list[JsonObject] = [{name: value} for value in values]
        found[name] = [_encoded(endpoint.body([5], **each), at) for at, each in enumerate(sampling)]
    for name in NUMBERS:
        found.setdefault(name, []).extend(endpoint.raw(name, literal) for literal in NO_NUMBERS)
    found["seed"] += [endpoint.raw("seed", literal) for literal in HUGE]
    if endpoint is CHAT:
        prompts = [{"messages": messages} for messages in NO_MESSAGES]
    else:
        prompts = [endpoint.body(prompt) for prompt in NO_PROMPTS]
    return found | {"prompt": [_encoded(body, at) for at, body in enumerate(prompts)]}


def _encoded(body: JsonObject, at: int) -> bytes:
    """Every other one asks for a stream."""
    return json.dumps(body | {"stream": at % 2 == 0}).encode()


@each_endpoint
async def test_hostile_requests_change_nothing(client: Client, solo: SoloRunner, endpoint: Endpoint) -> None:
    """vllm#57018, #16529, #7746, #6521, #6646, sglang#28153, #7670: refused; the same processes go on as before.

    After those of each field, the same request as ever has the same tokens and rows at once.
    """
    before = [worker["pid"] for worker in (await client.json("/cluster"))["workers"]]
    for name, bodies in hostile_requests(endpoint).items():
        for body in bodies:
            async with client.session.post(client.url + endpoint.path, data=body) as response:
                answer = json.loads(await response.text(), parse_constant=lambda what: pytest.fail(f"{what} in JSON"))
                assert (response.status, answer["error"]["type"]) == (400, "BadRequestError"), (name, body, answer)
        async with asyncio.timeout(UNTIL_S):
            canary = await client.generate([5, 6, 7], max_tokens=4)
        assert_equals_solo(canary, solo, [5, 6, 7], max_tokens=4)
    after = [worker["pid"] for worker in (await client.json("/cluster"))["workers"]]
    assert before == after


@text_endpoints
@pytest.mark.parametrize("text", ["é", "한", "👩‍👩‍👧"])
async def test_no_character_is_split(client: Client, tokenizer: Tokenizer, endpoint: Endpoint, text: str) -> None:
    """vllm-mlx#109, exo#1691, ferrox#124: every byte its own token; cut anywhere, one U+FFFD is the end."""
    regex = "".join(f"(?:{character})" for character in text)
    for wanted in range(1, len(text.encode()) + 1):
        shown: list[str] = []
        for stream in (False, True):
            fields = _following(endpoint, regex) | {"max_tokens": wanted, "temperature": 0}
            said = await ask(client, endpoint, endpoint.body(prompt_of(3), stream=stream, **fields))
            assert said.text == tokenizer.decode(said.token_ids, True)
            assert said.text.count(CUT) <= 1
            assert not any(CUT in part for part in (said.shown or [])[:-1])
            assert text.startswith(said.text.rstrip(CUT))
            shown.append(said.text)
        assert shown[0] == shown[1]
    assert shown[0] == text


def _following(endpoint: Endpoint, regex: str) -> JsonObject:
    return {"regex": regex} if endpoint is SGLANG else {"structured_outputs": {"regex": regex}}


@each_endpoint
async def test_stop_strings(client: Client, solo: SoloRunner, tokenizer: Tokenizer, endpoint: Endpoint) -> None:
    """miles#861, verifiers#1423, vllm#3672, #55483, #2538: rows and logprobs of the ids that are returned.

    The stop string is what two tokens in the middle of the output say, so that it begins inside the first of them.
    """
    sent = prompt_of(11, seed=2)
    prompt = await prompt_ids(client, endpoint, sent)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)
    expected = solo.run(prompt, params, 0)
    ids = [token.token_id for token in expected.tokens]
    stop, num_tokens = _stop_in(tokenizer, ids)
    cut = tokenizer.decode(ids[:num_tokens], True).split(stop)[0]
    for stream in (False, True):
        for keep in (False, True):
            fields: JsonObject = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 0, "stop": stop}
            body = endpoint.body(sent, stream=stream, include_stop_str_in_output=keep, **fields)
            said = await ask(client, endpoint, body)
            assert said.token_ids == ids[:num_tokens]
            assert (said.finish, said.stop_reason, said.num_logprobs) == ("stop", stop, num_tokens)
            assert said.rows is not None
            assert expected.rows_TLK is not None
            np.testing.assert_array_equal(said.rows, expected.rows_TLK[: len(prompt) + num_tokens - 1])
            if endpoint.has_text:
                assert said.text == cut + (stop if keep else "")
                assert all((cut + stop).startswith(part) for part in said.shown or [])


def _stop_in(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, int]:
    """A string that the output completes with one of its later tokens and that begins in the one before; which one."""
    for count in range(6, len(ids)):
        whole, before = tokenizer.decode(ids[:count], True), tokenizer.decode(ids[: count - 1], True)
        stop = whole[len(before) - 1 :]
        if (
            CUT not in whole[-4:]
            and len(stop) >= 2
            and whole.find(stop) == len(before) - 1
            and whole.startswith(before)
        ):
            return stop, count
    raise AssertionError("no token boundary with text on both sides")


@each_endpoint
async def test_the_first_token_does_not_wait(client: Client, endpoint: Endpoint) -> None:
    """production-stack#777: it comes in the first fifth of a stream of a hundred, the others one by one.

    With a model as small as this one the hop to prefill takes as long as several tokens; that the first one is sent
    before the second one is computed is `test_the_first_token_is_sent_at_once`.
    """
    for _ in range(10):  # others use this machine too
        body = endpoint.body(prompt_of(3), stream=True, max_tokens=100, temperature=0, ignore_eos=True)
        began, times, payloads = time.monotonic(), [], []
        async with client.session.post(client.url + endpoint.path, json=body) as response:
            async for event in sse_events(response):
                if event != "[DONE]":
                    payloads.append(json.loads(event))
                    times.append(time.monotonic() - began)
        said = endpoint.read(payloads)[0]
        assert len(said.token_ids) == 100
        first = next(at for at in range(len(payloads)) if endpoint.read(payloads[: at + 1])[0].token_ids)
        assert len(payloads) >= 20, "the stream was read as a whole"
        if times[first] < times[-1] / 5:
            return
    raise AssertionError(f"the first token came after {times[first]:.3f} s of {times[-1]:.3f} s")


async def test_prefill_makes_one_token(client: Client) -> None:
    """production-stack#777: chat with only max_completion_tokens; decode makes the other 49."""
    names = ("prompt_tokens_computed_total", "engine_steps_total")
    body = CHAT.body([], "only the limit of chat", max_completion_tokens=50, ignore_eos=True)
    tokens = await prompt_ids(client, CHAT, [])
    before = [await client.metric(f"moerelay_{name}", "prefill") for name in names]
    said = await ask(client, CHAT, body | {"stream": False})
    after = [await client.metric(f"moerelay_{name}", "prefill") for name in names]
    assert len(said.token_ids) == 50
    # Chunks of 16 tokens: as many steps as the prompt needs, and none for tokens that decode makes.
    assert after[1] - before[1] <= -(-(after[0] - before[0]) // 16) + 1 < 50
    assert after[0] - before[0] <= len(tokens) + len("only the limit of chat")


@each_endpoint
async def test_no_limit_is_the_rest_of_the_context(client: Client, endpoint: Endpoint) -> None:
    """vllm#42329."""
    prompt = await prompt_ids(client, endpoint, prompt_of(10))
    for stream in (False, True):
        body = endpoint.body(prompt_of(10), stream=stream, temperature=0, ignore_eos=True)
        said = await ask(client, endpoint, body)
        assert (len(said.token_ids), said.finish) == (128 - len(prompt), "length")
        assert said.rows is not None
        assert len(said.rows) == 127


@pytest.mark.parametrize("length", [127, 128, 129, 500])
async def test_prompts_around_the_context(client: Client, solo: SoloRunner, length: int) -> None:
    """vllm#765, #525: served up to the context, although a step takes 16 tokens; refused from there on."""
    prompt = prompt_of(length)
    for stream in (False, True):
        async with asyncio.timeout(UNTIL_S):
            answer = await client.generate(prompt, max_tokens=50, stream=stream)
        if length < 128:
            assert_equals_solo(answer, solo, prompt, max_tokens=1)
        else:
            assert answer.status == 400
            assert answer.error is not None
            assert f"{length} tokens" in answer.error["message"]
            assert "128" in answer.error["message"]
