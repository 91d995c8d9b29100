"""The official Python client, unchanged, against a router over fake workers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.fakes.fake_workers import Script, expected_tokens
from tests.unit.router.cluster import Cluster, running
from tests.unit.router.openai.vocabulary import chat_ids, content_for, said

HELLO = content_for(100)
PROMPT = chat_ids(("user", HELLO))


class Answer(BaseModel):
    """What a client may want parsed."""

    value: int


@asynccontextmanager
async def client(model: str, script: Script | None = None) -> AsyncIterator[tuple[AsyncOpenAI, Cluster]]:
    async with (
        running(script, model=model) as cluster,
        AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as speaking,
    ):
        yield speaking, cluster


async def test_chat(model: str) -> None:
    async with client(model) as (speaking, _):
        answer = await speaking.chat.completions.create(
            model=Path(model).name,
            messages=[{"role": "user", "content": HELLO}],
            n=2,
            max_completion_tokens=4,
            logprobs=True,
            top_logprobs=1,
            seed=1,
        )
    assert answer.object == "chat.completion"
    for index, choice in enumerate(answer.choices):
        assert choice.message.content == said(expected_tokens(PROMPT, 4, choice=index))
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [token.logprob for token in choice.logprobs.content] == [-0.5] * 4
        assert bytes(answer.choices[0].logprobs.content[1].bytes or []) == b"\xc3"  # type: ignore[union-attr,index]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 8)


async def test_chat_streamed(model: str) -> None:
    async with client(model) as (speaking, _):
        chunks = [
            chunk
            async for chunk in await speaking.chat.completions.create(
                model=Path(model).name,
                messages=[{"role": "user", "content": HELLO}],
                stop=["END"],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    *events, last = chunks
    assert "".join(event.choices[0].delta.content or "" for event in events) == "hé"
    assert [event.choices[0].delta.role for event in events] == ["assistant"] + [None] * (len(events) - 1)
    assert events[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == 5


async def test_the_clients_own_accumulator(model: str) -> None:
    """`chat.completions.stream` joins deltas, logprobs and the end into one message."""
    async with (
        client(model) as (speaking, _),
        speaking.chat.completions.stream(
            model=Path(model).name,
            messages=[{"role": "user", "content": HELLO}],
            n=2,
            logprobs=True,
            extra_body={"stop_token_ids": [128, 129]},
        ) as stream,
    ):
        answer = await stream.get_final_completion()
    for index, choice in enumerate(answer.choices):
        # The fifth token is the stop id: a token, and no text.
        assert choice.message.content == said(expected_tokens(PROMPT, 4, choice=index))
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or []) == 5


async def test_a_model_of_the_client_becomes_a_grammar(model: str) -> None:
    """The fakes do not obey it; that the output follows the grammar is the sampler's."""
    async with client(model) as (speaking, cluster):
        with pytest.raises(openai.LengthFinishReasonError):
            await speaking.chat.completions.parse(
                model=Path(model).name,
                messages=[{"role": "user", "content": HELLO}],
                max_completion_tokens=1,
                response_format=Answer,
            )
        (asked,) = cluster.decode[0].decode_requests
    (grammar,) = json.loads(asked.sampling.grammar)["grammars"]
    assert grammar["json_schema"]["properties"]["value"]["type"] == "integer"


async def test_completions(model: str) -> None:
    async with client(model) as (speaking, _):
        answer = await speaking.completions.create(
            model=Path(model).name, prompt=[[100], [5, 6]], max_tokens=3, n=2, logprobs=1, echo=True
        )
        listed = [card.id async for card in speaking.models.list()]
    assert [choice.text for choice in answer.choices[:2]] == ["hhé", "h" + said(expected_tokens([100], 3, choice=1))]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert listed == [Path(model).name]


async def test_completions_streamed_with_extras(model: str) -> None:
    async with client(model) as (speaking, _):
        events = [
            event
            async for event in await speaking.completions.create(
                model=Path(model).name,
                prompt=[100],
                max_tokens=5,
                stream=True,
                extra_body={"return_token_ids": True, "stream_options": {"routed_experts": "final"}},
            )
        ]
    assert "".join(event.choices[0].text for event in events) == "héEND"
    extra = [event.choices[0].model_extra or {} for event in events]
    assert [token for each in extra for token in each["token_ids"]] == expected_tokens([100], 5)
    assert extra[-1]["routed_experts"]


async def test_errors_are_the_clients_own(model: str) -> None:
    async with client(model) as (speaking, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await speaking.completions.create(model=Path(model).name, prompt="a", temperature=-1)
        assert (refused.value.param, refused.value.type) == ("temperature", "BadRequestError")
        assert str(refused.value.code) == "400"
        with pytest.raises(openai.NotFoundError):
            await speaking.completions.create(model="other", prompt="a")


async def test_a_stream_that_breaks_raises(model: str) -> None:
    async with client(model, Script(break_after=2)) as (speaking, _):
        events = await speaking.completions.create(model=Path(model).name, prompt=[100], max_tokens=9, stream=True)
        with pytest.raises(openai.APIError):
            async for _event in events:
                pass
