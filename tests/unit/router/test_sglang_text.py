"""Text in the SGLang dialect; what it must be is what the tokenizers library says."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fakes.fake_workers import Script, description, expected_tokens
from tests.unit.router.cluster import running
from tests.unit.router.test_sglang import post, stream
from tests.unit.router.text import checkpoints

VOCAB = 400
MODEL = description(vocab_size=VOCAB)
PROMPT = [70]


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    return checkpoints.byte_level(VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, reference: Tokenizer) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("model"), reference, dict(checkpoints.BYTE_LEVEL_SETTINGS))


def generated(num_tokens: int) -> list[int]:
    return expected_tokens(PROMPT, num_tokens, vocab=VOCAB)


async def test_text_in_and_out(folder: Path, reference: Tokenizer) -> None:
    text = "the quick brown fox, é"
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    async with running(Script(MODEL), model=str(folder)) as cluster:
        one = await post(cluster, text=text, sampling_params=sampling)
        several = await post(cluster, text=[text, "a"], sampling_params=sampling)
        asked = [list(request.token_ids) for request in cluster.decode[0].decode_requests]
    ids = list(reference.encode(text).ids)
    assert asked[0] == ids
    assert sorted(asked[1:]) == sorted([ids, list(reference.encode("a").ids)])
    tokens = expected_tokens(ids, 4, vocab=VOCAB)
    assert (one["output_ids"], one["text"]) == (tokens, reference.decode(tokens, skip_special_tokens=True))
    assert several[0]["text"] == one["text"]
    assert one["meta_info"]["prompt_tokens"] == len(ids)


async def test_events_repeat_the_text_so_far(folder: Path, reference: Tokenizer) -> None:
    body: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
    async with running(Script(MODEL), model=str(folder)) as cluster:
        events = await stream(cluster, **body)
        whole = await post(cluster, **body)
    assert whole["text"] == reference.decode(generated(30), skip_special_tokens=True)
    assert events[-1]["text"] == whole["text"]
    assert len({event["text"] for event in events}) > 5
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_string_cuts_the_text_only(folder: Path, reference: Tokenizer, keep: bool) -> None:
    texts = [reference.decode([token], skip_special_tokens=True) for token in generated(30)]
    at = next(i for i in range(3, 30) if texts[i].strip() and texts[i] not in "".join(texts[:i]))
    body = {"input_ids": PROMPT, "sampling_params": {"stop": texts[at], "no_stop_trim": keep, "ignore_eos": True}}
    async with running(Script(MODEL, chunk_tokens=7), model=str(folder)) as cluster:
        answer = await post(cluster, **body, return_logprob=True)
        events = await stream(cluster, **body)
    text = reference.decode(generated(at), skip_special_tokens=True) + (texts[at] if keep else "")
    for output in (answer, events[-1]):
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": texts[at]}
        assert (output["output_ids"], output["text"]) == (generated(at + 1), text)
    assert answer["meta_info"]["completion_tokens"] == len(answer["meta_info"]["output_token_logprobs"]) == at + 1


async def test_texts_in_logprobs(folder: Path, reference: Tokenizer) -> None:
    body = {"input_ids": [70, 71], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    async with running(Script(MODEL), model=str(folder)) as cluster:
        answer = await post(cluster, **body, return_text_in_logprobs=True, top_logprobs_num=1, logprob_start_len=0)
        without = await post(cluster, **body)
    meta = answer["meta_info"]

    def text(token: int) -> str:
        return reference.decode([token], skip_special_tokens=False)

    assert meta["output_token_logprobs"] == [[-0.5, token, text(token)] for token in answer["output_ids"]]
    assert meta["output_top_logprobs"] == [[[-0.25, 0, text(0)]]] * 2
    assert meta["input_token_logprobs"] == [[None, 70, text(70)], [-1 / 8, 71, text(71)]]
    assert meta["input_top_logprobs"] == [None, [[-1 / 8, 0, text(0)]]]
    assert [entry[2] for entry in without["meta_info"]["output_token_logprobs"]] == [None, None]


async def test_grammars_are_known_by_sglangs_names(folder: Path) -> None:
    async with running(Script(MODEL), model=str(folder)) as cluster:
        for name, value in {
            "regex": "[a-z]+",
            "json_schema": '{"type": "object"}',
            "ebnf": 'root ::= "yes" | "no"',
        }.items():
            await post(cluster, input_ids=PROMPT, sampling_params={"max_new_tokens": 1, name: value})
            assert cluster.decode[0].decode_requests[-1].sampling.grammar
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1, name: "x" * 100_000}}
            status, answer = await cluster.post(body, "/generate")
            assert (status, answer["error"]["param"]) == (400, name)
        _, info = await cluster.get("/get_model_info")
        assert (info["model_path"], info["tokenizer_path"]) == (str(folder), str(folder))
