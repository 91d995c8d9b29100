"""POST /tokenize and /detokenize."""

from typing import Any

import pytest

from router.openai.responses import TokenizeResponse
from tests.unit.router.cluster import running
from tests.unit.router.openai.vocabulary import chat_ids, ids


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [0, *ids("hé")]),
        ({"prompt": "hé", "add_special_tokens": False}, ids("hé")),
        ({"prompt": ""}, [0]),
        ({"prompt": "a" * 5000, "add_special_tokens": False}, ids("a") * 5000),
        ({"messages": [{"role": "user", "content": "a"}]}, chat_ids(("user", "a"))),
        (
            {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
            [1, *ids("user\na"), 2, *ids("\n")],
        ),
    ],
)
async def test_tokenize(model: str, body: dict[str, Any], tokens: list[int]) -> None:
    async with running(model=model) as cluster:
        status, answer = await cluster.post(body, "/tokenize")
    assert status == 200, answer
    TokenizeResponse.model_validate(answer)
    assert answer == {"count": len(tokens), "max_model_len": 128, "tokens": tokens, "token_strs": None}


async def test_tokens_as_texts(model: str) -> None:
    async with running(model=model) as cluster:
        _, answer = await cluster.post({"prompt": "hé", "return_token_strs": True}, "/tokenize")
    assert answer["token_strs"] == ["<|bos|>", "h", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("text", ["hé END 한", "", "x" * 5000])
async def test_there_and_back(model: str, text: str) -> None:
    async with running(model=model) as cluster:
        _, there = await cluster.post({"prompt": text}, "/tokenize")
        status, back = await cluster.post({"tokens": there["tokens"]}, "/detokenize")
    assert (status, back) == (200, {"prompt": "<|bos|>" + text})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "developer", "content": "a"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["5"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
async def test_refusals(model: str, path: str, body: dict[str, Any], param: str) -> None:
    async with running(model=model) as cluster:
        status, answer = await cluster.post(body, path)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_unknown_model(model: str) -> None:
    async with running(model=model) as cluster:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            status, answer = await cluster.post(body | {"model": "other"}, path)
            assert (status, answer["error"]["param"]) == (404, "model")


async def test_without_a_tokenizer() -> None:
    async with running() as cluster:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            status, answer = await cluster.post(body, path)
            assert status == 400
            assert "tokenizer" in answer["error"]["message"]
