"""Wrong values on every endpoint, streamed and not: a 400 that names the field as the endpoint does; no worker asked.

Numbers in docstrings refer to public reports of the same fault.
"""

import io
from collections.abc import Iterator
from typing import Any

import pytest

from tests.endpoints import CHAT, COMPLETIONS, ENDPOINTS, GENERATE, SGLANG, SKYRL, Endpoint
from tests.hostile import HOSTILE, HOSTILE_OF, HUGE, NO_MESSAGES, NO_NUMBERS, NO_PROMPTS, NUMBERS
from tests.unit.router.cluster import Cluster, running, strict_json

GENERATE_ABORT = "/inference/v1/abort_requests"

each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=repr)
with_ids = pytest.mark.parametrize("endpoint", [GENERATE, SKYRL, COMPLETIONS, SGLANG], ids=repr)


async def refused(cluster: Cluster, path: str, body: Any, param: str | None = None) -> str:
    """Returns the message. `body` as JSON value, or as bytes."""
    sent = {"data": body} if isinstance(body, bytes | io.BytesIO) else {"json": body}
    async with cluster.http.post(path, **sent) as response:
        answer = strict_json(await response.text())
        assert (response.status, response.content_type) == (400, "application/json"), (body, answer)
    error = answer["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert param is None or error["param"] == param, (body, error)
    assert len(error["message"]) <= 2001
    message: str = error["message"]
    return message


async def refused_both_ways(cluster: Cluster, endpoint: Endpoint, body: dict[str, Any], param: str) -> None:
    """A stream is never begun."""
    for stream in (False, True):
        await refused(cluster, endpoint.path, body | {"stream": stream}, param)
    assert not any(worker.decode_requests for worker in cluster.decode)


def hostile_fields(endpoint: Endpoint) -> Iterator[tuple[str, Any]]:
    own = HOSTILE_OF.get(GENERATE if endpoint is SKYRL else endpoint, {})
    for name, values in (HOSTILE | own).items():
        for value in values:
            if (endpoint, name, value) != (COMPLETIONS, "max_tokens", 0):  # see test_no_tokens_at_all
                yield name, value


@each_endpoint
async def test_fields(endpoint: Endpoint, model: str) -> None:
    """vllm#57018, #4529, #16529, #5963, #6521, sglang#28153, #7670, TensorRT-LLM#17158."""
    async with running(model=model) as cluster:
        for name, value in hostile_fields(endpoint):
            body = endpoint.body([5], **{name: value})
            await refused_both_ways(cluster, endpoint, body, endpoint.spelled(name))
        await cluster.canary()


@each_endpoint
@pytest.mark.parametrize("literal", NO_NUMBERS)
async def test_what_is_no_number(endpoint: Endpoint, literal: str, model: str) -> None:
    """sglang#28153, TensorRT-LLM#17158, Rapid-MLX#740: the refusal is strict JSON too."""
    async with running(model=model) as cluster:
        for name in NUMBERS:
            await refused(cluster, endpoint.path, endpoint.raw(name, literal))
            await cluster.canary()


@each_endpoint
@pytest.mark.parametrize("literal", HUGE, ids=lambda literal: literal[:24])
async def test_integers_beyond_64_bits(endpoint: Endpoint, literal: str, model: str) -> None:
    """vllm#57018: neither JSON, nor protobuf, nor NumPy overflows."""
    async with running(model=model) as cluster:
        for name in ("seed", "n", "top_k", "temperature", "stop_token_ids", "routed_experts_prompt_start"):
            value = f"[{literal}]" if name == "stop_token_ids" else literal
            if (name, literal.startswith("-"), len(literal) < 100) != ("temperature", False, True):
                await refused(cluster, endpoint.path, endpoint.raw(name, value))
        await cluster.canary()


@each_endpoint
async def test_seeds_of_64_bits(endpoint: Endpoint, model: str) -> None:
    """vllm#57018: every int64 is a seed, a negative one too, and reaches P and D as it is."""
    seeds = [-1, 0, 2**63 - 1, -(2**63)]
    async with running(model=model) as cluster:
        for seed in seeds:
            status, answer = await cluster.post(endpoint.body([5], seed=seed, max_tokens=1), endpoint.path)
            assert status == 200, answer
        assert [request.sampling.seed for request in cluster.decode[0].decode_requests] == seeds
        assert [request.sampling.seed for request in cluster.prefill[0].prefill_requests] == seeds


@each_endpoint
async def test_biases_within_bounds(endpoint: Endpoint, model: str) -> None:
    """sglang#7670: the last id of the vocabulary and no bias at all are fine."""
    async with running(model=model) as cluster:
        for bias in ({}, {"299": 100, "0": -100}):
            status, answer = await cluster.post(endpoint.body([5], logit_bias=bias, max_tokens=1), endpoint.path)
            assert status == 200, answer
        asked = cluster.decode[0].decode_requests[-1].sampling
        assert dict(asked.logit_bias) == {299: 100, 0: -100}


@with_ids
async def test_prompts(endpoint: Endpoint, model: str) -> None:
    """vllm#7746, #7283, #9634: empty in any form, out of the vocabulary, of another type."""
    async with running(model=model) as cluster:
        for prompt in NO_PROMPTS:
            await refused_both_ways(cluster, endpoint, endpoint.body(prompt), endpoint.prompt_field)
        await cluster.canary()


@pytest.mark.parametrize("text", ["", [""], [], ["a", ""], 5, [5, "a"], [["a"]]])
async def test_texts_that_are_empty_or_no_texts(text: Any, model: str) -> None:
    """vllm#7746."""
    async with running(model=model) as cluster:
        await refused(cluster, SGLANG.path, {"text": text}, "text")
        await refused(cluster, COMPLETIONS.path, {"prompt": text}, "prompt")
        await cluster.canary()


async def test_messages(model: str) -> None:
    """vllm#17119, #54017: a template that cannot render is the client's mistake, in a stream and in /tokenize too."""
    async with running(model=model) as cluster:
        for messages in NO_MESSAGES:
            await refused_both_ways(cluster, CHAT, {"messages": messages}, "messages")
            if messages is not None:
                await refused(cluster, "/tokenize", {"messages": messages}, "messages")
        raising = [{"role": "developer", "content": "a"}]
        for path in (CHAT.path, "/tokenize"):
            assert "no developers here" in await refused(cluster, path, {"messages": raising}, "messages")
        await cluster.canary()


async def test_an_assistant_may_begin(model: str) -> None:
    """vllm#17119: this template lets it; what a template refuses is `test_messages`."""
    async with running(model=model) as cluster:
        for stream in (False, True):
            body = {"messages": [{"role": "assistant", "content": "a"}], "max_tokens": 1, "stream": stream}
            async with cluster.http.post(CHAT.path, json=body) as response:
                assert response.status == 200, await response.text()


@pytest.mark.parametrize("tokens", [[300], [-1], [2**63], [2**70], [1.5], ["5"], [True], [None], [[5]], 5, "5", None])
async def test_ids_that_no_text_has(tokens: Any, model: str) -> None:
    """vllm#9634, on /detokenize."""
    async with running(model=model) as cluster:
        await refused(cluster, "/detokenize", {"tokens": tokens}, "tokens")
        await cluster.canary()


@pytest.mark.parametrize("prompt", [5, ["a"], ["a", 5], {"a": 1}, True, "\ud800"])
async def test_what_is_no_text(prompt: Any, model: str) -> None:
    """On /tokenize."""
    async with running(model=model) as cluster:
        await refused(cluster, "/tokenize", {"prompt": prompt}, None if prompt == "\ud800" else "prompt")
        await cluster.canary()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *((GENERATE_ABORT, {"request_ids": ids}, "request_ids") for ids in ([], "a", None, [5], [None])),
        (GENERATE_ABORT, {}, "request_ids"),
        *(("/abort_request", {"rid": rid}, "rid") for rid in (None, "", 5, ["a"])),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"abort_all": 1}, "abort_all"),
    ],
)
async def test_aborts(path: str, body: dict[str, Any], param: str) -> None:
    """SkyRL#1250: an abort that names nothing is an error and not a silent success."""
    async with running() as cluster:
        await refused(cluster, path, body, param)
        await cluster.canary()


@each_endpoint
async def test_no_tokens_at_all(endpoint: Endpoint, model: str) -> None:
    """vllm#6521, #10432, #9336, verl-tool#86: 0 is refused, but on completions with echo: the prompt only."""
    async with running(model=model) as cluster:
        body = endpoint.body([5], max_tokens=0)
        await refused_both_ways(cluster, endpoint, body, endpoint.spelled("max_tokens"))
        if endpoint is COMPLETIONS:
            prompt = [104, 105, 106]
            body = endpoint.body(prompt, max_tokens=0, echo=True, logprobs=0)
            status, answer = await cluster.post(body, endpoint.path)
            assert status == 200, answer
            said = endpoint.read([answer])[0]
            assert (said.token_ids, said.finish, said.num_logprobs) == ([], "length", 3)
            assert said.rows is not None
            assert len(said.rows) == 3
            assert answer["usage"]["completion_tokens"] == 0
        await cluster.canary()


@each_endpoint
async def test_limits_that_no_context_has_are_clamped(endpoint: Endpoint, model: str) -> None:
    """vllm#6521: 2**31 and 2**63 tokens are as many as fit."""
    async with running(model=model) as cluster:
        for wanted in (2**31, 2**63, 2**70):
            body = endpoint.body([5] * 120, "a" * 60, max_tokens=wanted, ignore_eos=True)
            status, answer = await cluster.post(body, endpoint.path)
            assert status == 200, answer
            asked = cluster.decode[0].decode_requests[-1]
            num_tokens = len(endpoint.read([answer])[0].token_ids)
            assert num_tokens == asked.sampling.max_tokens == 128 - len(asked.token_ids)


@each_endpoint
async def test_bodies_that_are_no_objects(endpoint: Endpoint, model: str) -> None:
    async with running(model=model) as cluster:
        for body in (
            b"",
            b"{",
            b"null",
            b"[]",
            b'"x"',
            b"\xff\xfe",
            b'{"a": "\xff"}',
            b"[" * 200_000,
            b'{"a":' * 90_000,
        ):
            await refused(cluster, endpoint.path, body)
        await cluster.canary()
