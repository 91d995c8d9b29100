"""One turn in each dialect, read as that dialect's clients read it."""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pybase64

from tests.e2e.cluster import JsonObject, decode_rows, sse_events

LAYERS, TOP_K = 2, 2

#: vLLM's array, prime-rl's object, SkyRL's object, SGLang's flat numbers.
DIALECTS = ("vllm", "dict", "skyrl", "sglang")

PATHS = {
    "vllm": "/inference/v1/generate",
    "dict": "/inference/v1/generate",
    "skyrl": "/skyrl/v1/generate",
    "sglang": "/generate",
}


@dataclass(frozen=True)
class Turn:
    """`rows` is None when the answer had none; `logprobs` are of the generated tokens."""

    token_ids: list[int]
    logprobs: list[float]
    finish: str
    rows: npt.NDArray[np.int64] | None


def turn_body(
    dialect: str, prompt: list[int], *, start: int, max_tokens: int, stream: bool, name: str | None = None
) -> JsonObject:
    """Greedy, with logprobs and the rows from `start` on, and never ended by a token."""
    if dialect == "sglang":
        return {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_start_len": start,
            "stream": stream,
            "rid": name,
        }
    sampling: JsonObject = {
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "routed_experts_prompt_start": start,
    }
    if dialect == "dict":
        sampling["routed_experts_format"] = "dict"
    return {"token_ids": prompt, "sampling_params": sampling, "stream": stream, "request_id": name}


async def take_turn(
    session: aiohttp.ClientSession, url: str, dialect: str, prompt: list[int], *, start: int = 0, **fields: Any
) -> Turn:
    """Raises AssertionError for everything that a strict client would refuse."""
    body = turn_body(dialect, prompt, start=start, **fields)
    async with session.post(url + PATHS[dialect], json=body) as response:
        assert response.status == 200, await response.text()
        if not body["stream"]:
            texts = [await response.text()]
        else:
            *texts, done = [event async for event in sse_events(response)]
            assert done == "[DONE]"
    return read_turn(dialect, texts, len(prompt), start)


def read_turn(dialect: str, texts: list[str], prompt_len: int, start: int) -> Turn:
    """From the JSON of a whole answer, or of every event of a stream."""
    if dialect == "sglang":
        return _read_sglang([json.loads(text) for text in texts], prompt_len, start)
    tokens: list[int] = []
    logprobs: list[float] = []
    parts: list[npt.NDArray[np.int64]] = []
    finish = ""
    for text in texts:
        (choice,) = json.loads(text)["choices"]
        tokens += choice["token_ids"]
        logprobs += [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
        finish = choice["finish_reason"] or finish
        if choice["routed_experts"] is not None:
            at = start + sum(map(len, parts))
            rows = decode_rows(choice["routed_experts"]) if dialect == "vllm" else _read_object(dialect, text, at)
            parts.append(rows.astype(np.int64))
    return Turn(tokens, logprobs, finish, np.concatenate(parts) if parts else None)


def _read_object(dialect: str, text: str, start: int) -> npt.NDArray[np.generic]:
    """As prime-rl: the data is found by its literal prefix, in text that was not parsed."""
    prefix = '"routed_experts":{"data":"'
    begin = text.index(prefix) + len(prefix)
    data = pybase64.b64decode(text[begin : text.index('"', begin)], validate=True)
    (choice,) = json.loads(text)["choices"]
    payload = choice["routed_experts"]
    assert payload["start"] == start
    assert payload["dtype"] in (("uint8", "int16", "int32") if dialect == "skyrl" else ("uint8", "uint16", "int32"))
    rows = np.frombuffer(data, payload["dtype"])
    assert payload["shape"][1:] == [LAYERS, TOP_K]
    return rows.reshape(payload["shape"])


def _read_sglang(events: list[JsonObject], prompt_len: int, start: int) -> Turn:
    """As slime: everything is in the last event, which repeats the earlier ones."""
    last = events[-1]
    meta = last["meta_info"]
    for event in events:
        length = len(event["output_ids"])
        assert last["output_ids"][:length] == event["output_ids"]
        assert [entry[1] for entry in event["meta_info"]["output_token_logprobs"]] == event["output_ids"]
    assert all("routed_experts" not in event["meta_info"] for event in events[:-1])
    rows = None
    if "routed_experts" in meta:
        flat = np.frombuffer(pybase64.b64decode(meta["routed_experts"].encode("ascii"), validate=True), dtype=np.int32)
        num_rows = prompt_len + meta["completion_tokens"] - 1 - start
        rows = flat.reshape(num_rows, LAYERS, TOP_K).astype(np.int64)
        assert meta["routed_experts_start_len"] == start
    return Turn(
        last["output_ids"],
        [entry[0] for entry in meta["output_token_logprobs"]],
        meta["finish_reason"]["type"],
        rows,
    )
