"""Requests that are too large in some number: refused at once, and nothing is made of them first.

Numbers in docstrings refer to public reports of the same fault.
"""

import gc
import io
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.endpoints import CHAT, COMPLETIONS, ENDPOINTS, GENERATE, SGLANG, SKYRL, Endpoint
from tests.unit.router.cluster import Cluster, running
from tests.unit.router.faults.test_hostile_values import each_endpoint, refused, with_ids
from tests.unit.router.openai.vocabulary import content_for

#: A refusal takes this much of a processor at most, the client's part included.
REFUSAL_S = 0.2

#: What a refusal may add to the largest size that the process ever had: the body itself, as bytes and as objects.
GROWTH_BYTES = 64 * 2**20


@pytest.fixture(autouse=True)
def _only_new_garbage() -> Iterator[None]:
    """What the tests' process holds, and a router's does not, is not looked through again and again."""
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def nothing_is_made() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GROWTH_BYTES


async def refused_at_once(cluster: Cluster, path: str, body: dict[str, Any], param: str) -> str:
    """Both ways. Processor time is counted, because others use this machine too; the best of three."""
    messages = set()
    for stream in (False, True):
        sent = json.dumps(body | {"stream": stream}).encode()
        seconds: list[float] = []
        while min(seconds, default=REFUSAL_S) >= REFUSAL_S:
            assert len(seconds) < 3, seconds
            began = time.process_time()
            messages.add(await refused(cluster, path, io.BytesIO(sent), param))
            seconds.append(time.process_time() - began)
    (message,) = messages
    assert not any(worker.decode_requests for worker in cluster.decode)
    return message


def asking(endpoint: Endpoint, name: str, value: Any, **others: Any) -> dict[str, Any]:
    """A request with one field by its name."""
    sampling: dict[str, Any] = {name: value} | others
    return endpoint.body([5], **sampling)


@each_endpoint
@pytest.mark.parametrize("n", [0, -1, 129, 10**6, 2**31, 2**63, 10**30])
async def test_choices(endpoint: Endpoint, n: int, model: str) -> None:
    """vllm#6646, gpt4all#3635: the number is looked at before anything is made of it."""
    async with running(model=model) as cluster:
        with nothing_is_made():
            message = await refused_at_once(cluster, endpoint.path, endpoint.body([5], n=n), "n")
        assert "128" in message or n < 1
        await cluster.canary()


@pytest.mark.parametrize("best_of", [0, -1, 2, 129, 10**6])
async def test_best_of(best_of: int, model: str) -> None:
    async with running(model=model) as cluster:
        body = COMPLETIONS.body([5], best_of=best_of)
        await refused_at_once(cluster, COMPLETIONS.path, body, "best_of")
        await cluster.canary()


#: So many prompts are 0.3 MB of ids or texts; of some more not one would be parsed (`--max-body-values`).
MANY = 9 * 10**4


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ["a"] * MANY}, "prompt"),
        (COMPLETIONS, {"prompt": [[5]] * MANY}, "prompt"),
        (COMPLETIONS, {"prompt": [""] * MANY}, "prompt"),
        (COMPLETIONS, {"prompt": [[]] * MANY}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * MANY}, "prompt"),
        (COMPLETIONS, {"prompt": [[5]] * 65, "n": 2}, "n"),
        (SGLANG, {"text": ["a"] * MANY}, "text"),
        (SGLANG, {"input_ids": [[5]] * MANY}, "input_ids"),
        (SGLANG, {"input_ids": [[]] * MANY}, "input_ids"),
        (SGLANG, {"input_ids": [5] * MANY}, "input_ids"),
        (SGLANG, {"input_ids": [[5]] * 65, "sampling_params": {"n": 2}}, "n"),
        (SGLANG, {"input_ids": [[5]], "rid": ["a"] * MANY}, "rid"),
        (SGLANG, {"input_ids": [[5]], "sampling_params": [{"n": 2**40}]}, "n"),
        (GENERATE, {"token_ids": [5] * MANY, "sampling_params": {}}, "token_ids"),
        (GENERATE, {"token_ids": ["5"] * MANY, "sampling_params": {}}, "token_ids"),
        (SKYRL, {"token_ids": [5] * MANY, "sampling_params": {}}, "token_ids"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * MANY}]}, "messages"),
        (CHAT, {"messages": [5] * MANY}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_prompts(endpoint: Endpoint, body: dict[str, Any], param: str, model: str) -> None:
    """vllm#6646: counted before one of them is encoded."""
    async with running(model=model) as cluster:
        with nothing_is_made():
            await refused_at_once(cluster, endpoint.path, body, param)
        await cluster.canary()


LISTS: dict[str, Any] = {
    "stop": ["a"] * MANY,
    "stop_token_ids": [5] * MANY,
    "logit_bias": {str(key): 1 for key in range(MANY)},
}
WRONG_LISTS: dict[str, Any] = {
    "stop": [5] * MANY,
    "stop_token_ids": ["5"] * MANY,
    "logit_bias": {f"x{key}": "x" for key in range(MANY)},
}


@each_endpoint
@pytest.mark.parametrize("lists", [LISTS, WRONG_LISTS], ids=["right", "wrong"])
async def test_lists(endpoint: Endpoint, lists: dict[str, Any], model: str) -> None:
    """vllm#6646: 10**5 entries, right ones or wrong ones, in a list that may have far fewer."""
    async with running(model=model) as cluster:
        with nothing_is_made():
            for name, value in lists.items():
                await refused_at_once(cluster, endpoint.path, asking(endpoint, name, value), name)
        await cluster.canary()


@pytest.mark.parametrize("endpoint", [GENERATE, SKYRL, COMPLETIONS, CHAT], ids=repr)
async def test_lists_of_some_endpoints(endpoint: Endpoint, model: str) -> None:
    bodies = {"bad_words": (["a"] * MANY, [5] * MANY), "allowed_token_ids": ([5] * MANY, ["5"] * MANY)}
    async with running(model=model) as cluster:
        with nothing_is_made():
            for name, values in bodies.items():
                for value in values:
                    await refused_at_once(cluster, endpoint.path, asking(endpoint, name, value), name)
        await cluster.canary()


@each_endpoint
@pytest.mark.parametrize(("wanted", "fits"), [(0, True), (1, True), (20, True), (21, False), (301, False)])
async def test_logprobs(endpoint: Endpoint, wanted: int, fits: bool, model: str) -> None:
    """local-inference-lab/vllm#264, vllm#16836: at most --max-logprobs, 20."""
    async with running(model=model) as cluster:
        body = endpoint.body([5], max_tokens=3, logprobs=wanted)
        if fits:
            status, answer = await cluster.post(body, endpoint.path)
            assert status == 200, answer
            assert endpoint.read([answer])[0].num_logprobs == 3
        else:
            message = await refused_at_once(cluster, endpoint.path, body, endpoint.spelled("logprobs"))
            assert "20" in message
            assert str(wanted) in message
        await cluster.canary()


@pytest.mark.parametrize("endpoint", [GENERATE, SKYRL, COMPLETIONS, CHAT], ids=repr)
async def test_logprobs_of_the_whole_vocabulary(endpoint: Endpoint, model: str) -> None:
    """vllm#16836: -1 is every id, for the prompt as well; over the limit unless the server was told otherwise."""
    names = ("logprobs", "prompt_logprobs")
    async with running(model=model) as cluster:
        for name in names:
            for value in (-1, 300, 10**9, 2**31 - 1):
                body = asking(endpoint, name, value, max_tokens=1)
                status, answer = await cluster.post(body, endpoint.path)
                assert (status, answer["error"]["param"]) == (400, endpoint.spelled(name)), answer
        await cluster.canary()
    async with running(model=model, max_logprobs=300) as cluster:
        for name in names:
            body = asking(endpoint, name, -1, max_tokens=1)
            status, answer = await cluster.post(body, endpoint.path)
            assert status == 200, answer
            assert getattr(cluster.decode[0].decode_requests[-1].sampling, name) == 300


@with_ids
@pytest.mark.parametrize(("length", "fits"), [(127, True), (128, False), (129, False), (500, False)])
async def test_prompts_and_the_context(endpoint: Endpoint, length: int, fits: bool, model: str) -> None:
    """vllm#765, #525, #3851, #20409: one token must be left to generate; the refusal names both numbers."""
    async with running(model=model) as cluster:
        for max_tokens in (1, None):
            body = endpoint.body([5] * length, max_tokens=max_tokens, ignore_eos=True)
            if fits:
                status, answer = await cluster.post(body, endpoint.path)
                assert status == 200, answer
                assert len(endpoint.read([answer])[0].token_ids) == 1
            else:
                message = await refused_at_once(cluster, endpoint.path, body, endpoint.prompt_field)
                assert f"{length} tokens" in message
                assert "128" in message
        await cluster.canary()


async def test_texts_and_the_context(model: str) -> None:
    """vllm#765: the same of a prompt that only encoding measures; one id per letter and one in front."""
    async with running(model=model) as cluster:
        for body, path, param in (
            ({"prompt": "h" * 127}, COMPLETIONS.path, "prompt"),
            ({"text": "h" * 127}, SGLANG.path, "text"),
            ({"messages": [{"role": "user", "content": "h" * 200}]}, CHAT.path, "messages"),
        ):
            message = await refused_at_once(cluster, path, body, param)
            assert " tokens" in message
            assert "128" in message
        await cluster.canary()


@each_endpoint
async def test_more_tokens_than_fit(endpoint: Endpoint, model: str) -> None:
    """vllm#765: clamped to the context, alike everywhere."""
    async with running(model=model) as cluster:
        body = endpoint.body([5] * 120, "a" * 80, max_tokens=50, ignore_eos=True)
        status, answer = await cluster.post(body, endpoint.path)
        assert status == 200, answer
        (asked,) = cluster.decode[0].decode_requests
        said = endpoint.read([answer])[0]
        assert len(said.token_ids) == 128 - len(asked.token_ids) < 50
        assert said.finish == "length"


@each_endpoint
@pytest.mark.parametrize("both", [False, True], ids=["P/D", "aggregated"])
@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}], ids=["absent", "null"])
async def test_no_limit_is_the_rest_of_the_context(
    endpoint: Endpoint, both: bool, limit: dict[str, Any], model: str
) -> None:
    """vllm#42329: never 16."""
    async with running(model=model, both=both) as cluster:
        body = endpoint.body([5] * 10, content_for(100), ignore_eos=True, **limit)
        status, answer = await cluster.post(body, endpoint.path)
        assert status == 200, answer
        (asked,) = cluster.decode[0].decode_requests
        assert endpoint.has_text or len(asked.token_ids) == 10
        said = endpoint.read([answer])[0]
        assert len(said.token_ids) == 128 - len(asked.token_ids)
        assert (said.finish, said.num_finishes) == ("length", 1)


@pytest.mark.parametrize("value", ["x" * 257, "x" * 10_000, "a b", "é", "a%0d%0aX-Evil: 1\t"])
async def test_names_of_requests(value: str, model: str) -> None:
    """vllm#10968: a name of 10 KB is refused on every endpoint and repeated nowhere; in a header as in the body."""
    async with running(model=model) as cluster:
        for endpoint in ENDPOINTS:
            for stream in (False, True):
                body, headers = endpoint.body([5], max_tokens=2, stream=stream), {"X-Request-Id": value}
                named = endpoint.body([5], max_tokens=2, stream=stream, request_id=value)
                for sent, given in ((body, headers), (named, {})):
                    async with cluster.http.post(endpoint.path, json=sent, headers=given) as response:
                        text = await response.text()
                        assert response.status == 400, text
                        assert value not in text + str(response.headers)
                        param = json.loads(text)["error"]["param"]
                        assert param in ("request_id", endpoint.spelled("request_id"))
        assert cluster.decode[0].decode_requests == []
        await cluster.canary()


@each_endpoint
async def test_the_longest_name_costs_each_event_little(endpoint: Endpoint, model: str) -> None:
    """vllm#10968: what may be repeated in every event has 256 characters at most."""
    name = "x" * 256
    async with running(model=model) as cluster:
        body = endpoint.body([5], content_for(100), max_tokens=3, stream=True, ignore_eos=True)
        async with cluster.http.post(endpoint.path, json=body, headers={"X-Request-Id": name}) as response:
            assert response.status == 200
            assert response.headers["X-Request-Id"] == name
            events = (await response.read()).split(b"\n\n")
    assert max(event.count(name.encode()) for event in events) <= 1
