"""A group of rollouts in SGLang's words, as slime and Miles ask for them: `python examples/sglang_rollout.py [URL]`.

Needs aiohttp and numpy only. Two turns: the second one asks only for the rows that are new.
"""

import argparse
import asyncio
import base64
import sys
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

PROMPT = [5, 6, 7, 8, 9]
GROUP_SIZE = 4
NEXT_TURN = [10, 11, 12]

Rows = npt.NDArray[np.int32]


@dataclass
class Rollout:
    """One sequence. `rows` are those of positions [start, start + len(rows))."""

    tokens: list[int]
    num_prompt_tokens: int
    logprobs: list[float]
    start: int
    rows: Rows
    weight_version: str


async def model_shape(session: aiohttp.ClientSession) -> tuple[int, int]:
    """(layers, experts per token): a trainer knows it from the checkpoint; the dialect D says it in `shape`."""
    body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "routed_experts_format": "dict"}}
    async with session.post("/inference/v1/generate", json=body) as response:
        answer = await response.json()
    _, layers, top_k = answer["choices"][0]["routed_experts"]["shape"]
    return layers, top_k


def rollout_of(tokens: list[int], answer: dict[str, Any], shape: tuple[int, int]) -> Rollout:
    """SGLang sends rows as flat little-endian int32 without a header."""
    meta = answer["meta_info"]
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    rows = flat.reshape(-1, *shape)
    start = meta["routed_experts_start_len"]
    assert len(rows) == len(tokens) + len(answer["output_ids"]) - 1 - start
    return Rollout(
        tokens + answer["output_ids"],
        len(tokens),
        [logprob for logprob, _, _ in meta["output_token_logprobs"]],
        start,
        rows,
        meta["weight_version"],
    )


async def generate(session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    common = {"return_logprob": True, "return_routed_experts": True}
    async with session.post("/generate", json=common | body) as response:
        answer = await response.json()
        if response.status != 200:
            raise SystemExit(answer["error"]["message"])
        return answer


async def main(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        shape = await model_shape(session)
        sampling = {"n": GROUP_SIZE, "max_new_tokens": 16, "temperature": 1.0}
        group = await generate(session, {"input_ids": PROMPT, "sampling_params": sampling})
        rollouts = [rollout_of(PROMPT, answer, shape) for answer in group]
        for rollout in rollouts:
            print(f"{len(rollout.logprobs)} tokens, logprob {sum(rollout.logprobs):.2f}, rows {rollout.rows.shape}")

        # The last token of the first turn was never forwarded: its row comes first in the second one.
        first = rollouts[0]
        known = len(first.tokens) - 1
        body = {"input_ids": first.tokens + NEXT_TURN, "sampling_params": {"max_new_tokens": 8, "temperature": 1.0}}
        answer = await generate(session, body | {"routed_experts_start_len": known})
        second = rollout_of(first.tokens + NEXT_TURN, answer, shape)
        conversation = np.concatenate([first.rows, second.rows])
        assert len(conversation) == len(second.tokens) - 1
        print(f"two turns: {len(second.tokens)} tokens, rows {conversation.shape}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="default: %(default)s")
    try:
        asyncio.run(main(parser.parse_args().url.rstrip("/")))
    except aiohttp.ClientConnectionError as error:
        sys.exit(f"nothing answers: {error}")
