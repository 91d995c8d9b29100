"""Every dialect on a real cluster: one turn, three turns with the known prefix left out, and aborts."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from common.engine.solo import SoloRunner
from common.sampling import SamplingParams
from tests.e2e.cluster import Client, JsonObject, sse_events
from tests.e2e.dialects import DIALECTS, LAYERS, PATHS, TOP_K, Turn, read_turn, take_turn, turn_body
from tests.e2e.test_routing_rows import prompt_of
from tests.parity.reference import differing_rows, run_reference

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("disaggregated")]

each_dialect = pytest.mark.parametrize("dialect", DIALECTS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def solo_turn(solo: SoloRunner, prompt: list[int], max_tokens: int, start: int) -> Turn:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    expected = solo.run(prompt, params, start)
    assert expected.rows_TLK is not None
    return Turn(
        [token.token_id for token in expected.tokens],
        [token.logprob.logprob for token in expected.tokens if token.logprob],
        expected.finish.reason,
        expected.rows_TLK.astype(np.int64),
    )


def assert_same(answer: Turn, expected: Turn) -> None:
    """Tokens, logprobs (every bit) and rows."""
    assert (answer.token_ids, answer.finish) == (expected.token_ids, expected.finish)
    assert [np.float32(value) for value in answer.logprobs] == [np.float32(value) for value in expected.logprobs]
    np.testing.assert_array_equal(answer.rows, expected.rows)


@each_dialect
@streamed_or_not
@pytest.mark.parametrize(("length", "max_tokens"), [(1, 1), (17, 9), (40, 20)])
async def test_one_turn(
    client: Client, solo: SoloRunner, dialect: str, stream: bool, length: int, max_tokens: int
) -> None:
    prompt = prompt_of(length, seed=3)
    for start in {0, length - 1, length}:
        answer = await take_turn(
            client.session, client.url, dialect, prompt, start=start, max_tokens=max_tokens, stream=stream
        )
        assert answer.rows is not None
        assert answer.rows.shape == (length + max_tokens - 1 - start, LAYERS, TOP_K)
        assert_same(answer, solo_turn(solo, prompt, max_tokens, start))


@each_dialect
@streamed_or_not
async def test_three_turns_stitch_to_one_forward_pass(
    client: Client, solo: SoloRunner, tiny_model: Path, dialect: str, stream: bool
) -> None:
    """Each turn leaves out the known rows: all but that of the last sampled token, which comes with the next turn."""
    conversation: list[int] = []
    parts = []
    for turn, (added, max_tokens) in enumerate([(19, 12), (7, 15), (22, 6)]):
        start = max(0, len(conversation) - 1)
        conversation += prompt_of(added, seed=10 + turn)
        answer = await take_turn(
            client.session, client.url, dialect, conversation, start=start, max_tokens=max_tokens, stream=stream
        )
        assert_same(answer, solo_turn(solo, conversation, max_tokens, start))
        parts.append(answer.rows)
        conversation += answer.token_ids
    stitched = np.concatenate([rows for rows in parts if rows is not None])
    assert stitched.shape == (len(conversation) - 1, LAYERS, TOP_K)
    at_once = solo.run(conversation[:-1], SamplingParams(max_tokens=1, temperature=0.0)).rows_TLK
    np.testing.assert_array_equal(stitched, at_once)
    assert differing_rows(stitched, run_reference(tiny_model, conversation[:-1])) == []


def abort_call(dialect: str, name: str) -> tuple[str, JsonObject]:
    if dialect == "sglang":
        return "/abort_request", {"rid": name}
    return "/inference/v1/abort_requests", {"request_ids": [name]}


async def abort(client: Client, dialect: str, name: str) -> bool:
    """Whether the request was live."""
    path, body = abort_call(dialect, name)
    async with client.session.post(client.url + path, json=body) as response:
        assert response.status in (200, 404), await response.text()
        return response.status == 200


def assert_equal_spans(answer: Turn, solo: SoloRunner, prompt: list[int]) -> None:
    """An abort keeps what is there: a prefix of the solo run, tokens, logprobs and rows of equal span."""
    assert len(answer.logprobs) == len(answer.token_ids)
    if not answer.token_ids:
        assert answer.rows is None
        return
    expected = solo_turn(solo, prompt, len(answer.token_ids), 0)
    assert_same(Turn(answer.token_ids, answer.logprobs, expected.finish, answer.rows), expected)


@each_dialect
async def test_abort_of_a_stream(client: Client, solo: SoloRunner, dialect: str) -> None:
    prompt = prompt_of(9, seed=4)
    for attempt in range(10):  # the request may be faster than its abort
        name = f"stream-{dialect}-{attempt}"
        body = turn_body(dialect, prompt, start=0, max_tokens=110, stream=True, name=name)
        texts: list[str] = []
        async with client.session.post(client.url + PATHS[dialect], json=body) as response:
            async for event in sse_events(response):
                if not texts:
                    await abort(client, dialect, name)
                texts.append(event)
        assert texts.pop() == "[DONE]"
        answer = read_turn(dialect, texts, len(prompt), 0)
        assert_equal_spans(answer, solo, prompt)
        if answer.finish == "abort":
            return
    raise AssertionError("no request lived long enough to be aborted")


@each_dialect
async def test_abort_of_a_whole_answer(client: Client, solo: SoloRunner, dialect: str) -> None:
    prompt = prompt_of(33, seed=5)
    for attempt in range(10):
        name = f"whole-{dialect}-{attempt}"
        request = asyncio.ensure_future(
            take_turn(client.session, client.url, dialect, prompt, max_tokens=90, stream=False, name=name)
        )
        while not request.done() and not await abort(client, dialect, name):
            pass
        answer = await request
        assert_equal_spans(answer, solo, prompt)
        if answer.finish == "abort":
            return
    raise AssertionError("no request lived long enough to be aborted")


async def test_abort_of_one_choice_of_a_batch(client: Client, solo: SoloRunner) -> None:
    """Its neighbours, of its own prompt too, go on to their ends."""
    prompts = [prompt_of(9, seed=6), prompt_of(21, seed=7)]
    for attempt in range(10):
        body = turn_body("sglang", [], start=0, max_tokens=100, stream=True, name=f"batch-{attempt}")
        body["input_ids"] = prompts
        body["sampling_params"]["n"] = 2
        last: dict[int, JsonObject] = {}
        async with client.session.post(f"{client.url}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            async for event in sse_events(response):
                if event == "[DONE]":
                    continue
                parsed = json.loads(event)
                if parsed["index"] == 2 and 2 not in last:
                    await abort(client, "sglang", parsed["meta_info"]["id"])
                last[parsed["index"]] = parsed
        answers = [read_turn("sglang", [json.dumps(last[index])], len(prompts[index // 2]), 0) for index in range(4)]
        for index, answer in enumerate(answers):
            assert_equal_spans(answer, solo, prompts[index // 2])
        assert [answer.finish for answer in answers if answer is not answers[2]] == ["length"] * 3
        if answers[2].finish == "abort":
            return
    raise AssertionError("no choice lived long enough to be aborted")


async def test_sglang_probes(client: Client, tiny_model: Path) -> None:
    async with client.session.get(f"{client.url}/health_generate") as response:
        assert response.status == 200
    info = await client.json("/get_model_info")
    assert (info["model_path"], info["is_generation"]) == (str(tiny_model), True)
    assert (await client.json("/get_server_info"))["context_length"] == 128
