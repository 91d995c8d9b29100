"""How choices end, on every endpoint, streamed and not. The fakes say "h", two halves of "é", "E", "ND", "!", …

Numbers in docstrings refer to public reports of the same fault.
"""

from typing import Any

import pytest

from common.pb import types_pb2
from tests.endpoints import GENERATE, SGLANG, SKYRL, Endpoint, Said
from tests.fakes.fake_workers import FakeWorker, Script, description, expected_tokens
from tests.unit.router.cluster import Cluster, over, running, split_events, strict_json
from tests.unit.router.faults.test_hostile_values import each_endpoint
from tests.unit.router.openai.vocabulary import chat_ids, content_for

#: What is answered with SAID of `vocabulary.py`.
PROMPT, CONTENT = [100], content_for(100)
CUT = "\N{REPLACEMENT CHARACTER}"


def prompt_len(endpoint: Endpoint) -> int:
    return len(chat_ids(("user", CONTENT))) if endpoint.prompt_field == "messages" else len(PROMPT)


async def ask(cluster: Cluster, endpoint: Endpoint, *, stream: bool, n: int = 1, **sampling: Any) -> list[Said]:
    """The choices of an answer of which every event is well-formed."""
    fields: dict[str, Any] = {"logprobs": 0, "n": n} | sampling
    body = endpoint.body(PROMPT, CONTENT, stream=stream, **fields)
    async with cluster.http.post(endpoint.path, json=body) as response:
        assert response.status == 200, await response.text()
        if stream:
            *events, done = split_events(await response.read())
            assert done == b"[DONE]"
            payloads = [strict_json(event.decode()) for event in events]
        else:
            payloads = [strict_json(await response.text())]
    choices = endpoint.read(payloads)
    assert sorted(choices) == list(range(n))
    return [choices[index] for index in range(n)]


def assert_spans(endpoint: Endpoint, said: Said, tokens: list[int]) -> None:
    """Tokens, logprobs and rows of the same tokens."""
    assert said.token_ids == tokens
    assert said.num_logprobs == len(tokens)
    assert said.rows is not None
    assert len(said.rows) == prompt_len(endpoint) + len(tokens) - 1


ENDS: list[tuple[str, dict[str, Any], str, int, str, int | str | None]] = [
    ("length", {"max_tokens": 5}, "héEND", 5, "length", None),
    ("length in a character", {"max_tokens": 2}, "h" + CUT, 2, "length", None),
    ("length in a stop string", {"max_tokens": 4, "stop": "END"}, "héE", 4, "length", None),
    ("stop string", {"stop": "END"}, "hé", 5, "stop", "END"),
    ("stop string, kept", {"stop": ["xyz", "END"], "include_stop_str_in_output": True}, "héEND", 5, "stop", "END"),
    ("stop string inside a token", {"stop": "N"}, "héE", 5, "stop", "N"),
    ("stop string with the first token", {"stop": "h"}, "", 1, "stop", "h"),
    ("false start", {"stop": "EXIT", "max_tokens": 9}, "héEND!ENx?", 9, "length", None),
    ("stop id", {"stop_token_ids": [135]}, "héEND", 6, "stop", 135),
    ("stop id, kept", {"stop_token_ids": [135], "include_stop_str_in_output": True}, "héEND!", 6, "stop", 135),
    ("stop id with the first token", {"stop_token_ids": [100]}, "", 1, "stop", 100),
]


@each_endpoint
@pytest.mark.parametrize("chunk_tokens", [1, 4])
@pytest.mark.parametrize(
    ("fields", "text", "num_tokens", "reason", "matched"), [end[1:] for end in ENDS], ids=[end[0] for end in ENDS]
)
async def test_ends(
    endpoint: Endpoint,
    chunk_tokens: int,
    fields: dict[str, Any],
    text: str,
    num_tokens: int,
    reason: str,
    matched: int | str | None,
    model: str,
) -> None:
    """vllm-mlx#628, llm-d-inference-sim#545, miles#861, verifiers#1423, vllm#3672, #55483, #2538, vllm-mlx#109.

    One reason per choice, whatever ends it. A stop string cuts the text alone: ids, logprobs and rows keep every token
    through the one that completes it. What is shown is never taken back, and shows no part of a stop string.
    """
    tokens = expected_tokens(PROMPT, num_tokens)
    async with running(Script(chunk_tokens=chunk_tokens), model=model) as cluster:
        for stream in (False, True):
            (said,) = await ask(cluster, endpoint, stream=stream, **fields)
            assert_spans(endpoint, said, tokens)
            assert (said.finish, said.num_finishes, said.went_on) == (reason, 1, False)
            if said.stop_reason is not None or reason == "stop":
                assert said.stop_reason == matched
            if endpoint.has_text:
                assert said.text == text
                assert said.shown is not None
                assert all(text.startswith(shown) for shown in said.shown)
                assert not any(CUT in shown for shown in said.shown[:-1])


@each_endpoint
async def test_end_of_sequence(endpoint: Endpoint, model: str) -> None:
    """vllm-mlx#628: id 2 ends a choice on its own, and is no text."""
    start = 260  # 302 % 300 is the seventh
    async with running(Script(chunk_tokens=2), model=model) as cluster:
        for stream in (False, True):
            body = endpoint.body([start], content_for(start), stream=stream, max_tokens=20)
            async with cluster.http.post(endpoint.path, json=body) as response:
                raw = await response.read()
            payloads = (
                [strict_json(e.decode()) for e in split_events(raw)[:-1]] if stream else [strict_json(raw.decode())]
            )
            said = endpoint.read(payloads)[0]
            assert said.token_ids == [260, 267, 274, 281, 288, 295, 2]
            assert (said.finish, said.num_finishes, said.went_on) == ("stop", 1, False)
            assert said.stop_reason == (2 if endpoint is SGLANG else None)
            assert "im_end" not in (said.text or "")


@each_endpoint
async def test_usage_counts_what_is_returned(endpoint: Endpoint, model: str) -> None:
    """miles#861: tokens that were computed behind a stop string are nobody's."""
    async with running(Script(chunk_tokens=8), model=model) as cluster:
        body = endpoint.body(PROMPT, CONTENT, stop="END", max_tokens=20)
        status, answer = await cluster.post(body, endpoint.path)
        assert status == 200
        usage = answer["meta_info"] if endpoint is SGLANG else answer["usage"]
        assert usage["completion_tokens"] == 5


@each_endpoint
async def test_choices_end_on_their_own(endpoint: Endpoint, model: str) -> None:
    """verifiers#1423: the second choice says other things and does not stop where the first does."""
    async with running(model=model) as cluster:
        for stream in (False, True):
            first, second = await ask(cluster, endpoint, stream=stream, n=2, stop="END", max_tokens=8)
            assert_spans(endpoint, first, expected_tokens(PROMPT, 5))
            assert_spans(endpoint, second, expected_tokens(PROMPT, 8, choice=1))
            assert (first.finish, second.finish) == ("stop", "length")


@each_endpoint
async def test_the_reason_comes_with_the_last_token(endpoint: Endpoint, model: str) -> None:
    """vllm#35705: one rule on all endpoints: the event with the last token has the last text and the reason as well."""
    async with running(model=model) as cluster:
        body = endpoint.body(PROMPT, CONTENT, stream=True, max_tokens=5)
        async with cluster.http.post(endpoint.path, json=body) as response:
            *events, _ = split_events(await response.read())
    before = endpoint.read([strict_json(event.decode()) for event in events[:-1]])[0]
    after = endpoint.read([strict_json(event.decode()) for event in events])[0]
    assert (before.finish, len(before.token_ids)) == (None, 4)
    assert (after.finish, len(after.token_ids)) == ("length", 5)
    if endpoint.has_text:
        assert (before.text, after.text) == ("héE", "héEND")


@pytest.mark.parametrize("endpoint", [GENERATE, SKYRL], ids=repr)
async def test_stop_strings_need_text(endpoint: Endpoint) -> None:
    """A cluster without a tokenizer says so instead of never stopping."""
    async with running() as cluster:
        status, answer = await cluster.post(endpoint.body(PROMPT, stop="END"), endpoint.path)
        assert (status, answer["error"]["param"]) == (400, "stop")
        assert "tokenizer" in answer["error"]["message"]
        await cluster.canary()


@each_endpoint
async def test_routing_off_everywhere_is_null(endpoint: Endpoint, model: str) -> None:
    """slime#1909: no rows, and never zeros."""
    off = Script(description(routing_enabled=False))
    async with running(off, model=model, enable_return_routed_experts=False) as cluster:
        for stream in (False, True):
            (said,) = await ask(cluster, endpoint, stream=stream, max_tokens=3)
            assert said.token_ids == expected_tokens(PROMPT, 3)
            assert said.rows is None


@each_endpoint
@pytest.mark.parametrize(("prefill", "decode"), [(False, True), (True, False), (False, False)])
async def test_routing_off_at_a_worker_is_refused(endpoint: Endpoint, prefill: bool, decode: bool, model: str) -> None:
    """slime#1909, tunix#2046, NeMo-RL#3327: asked for but off somewhere is a 503, and /cluster says why."""
    prefills = [FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, Script(description(routing_enabled=prefill)))]
    decodes = [FakeWorker("decode-0", types_pb2.ROLE_DECODE, Script(description(routing_enabled=decode)))]
    async with over(prefills, decodes, model=model) as cluster:
        for stream in (False, True):
            status, answer = await cluster.post(endpoint.body(PROMPT, stream=stream, max_tokens=1), endpoint.path)
            assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
        _, view = await cluster.get("/cluster")
        reasons = [worker["refused"] or "" for worker in view["workers"]]
        assert all(
            "--enable-return-routed-experts" in r for r, on in zip(reasons, (prefill, decode), strict=True) if not on
        )
        assert decodes[0].decode_requests == []
