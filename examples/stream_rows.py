"""Streams one completion and decodes the routing rows of every event: `python examples/stream_rows.py [URL]`.

Needs aiohttp and numpy only. Row i is position i: the whole prompt, then every generated token but the last, which was
never forwarded. The arrays of a stream, joined in order, are the array of the non-streaming answer.
"""

import argparse
import asyncio
import base64
import io
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np

PROMPT = [5, 6, 7, 8, 9]
BODY = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 16, "temperature": 0}, "stream": True}


async def events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Delta events stay below 64 KiB by default, so aiohttp's line reader can take them."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/inference/v1/generate", json=body) as response:
        if response.status != 200:
            raise SystemExit((await response.json())["error"]["message"])
        async for line in response.content:
            payload = line.decode().removeprefix("data: ").strip()
            if payload == "[DONE]":
                return
            if payload:
                yield json.loads(payload)
    raise RuntimeError("the stream broke off: without [DONE] it is not finished")


async def main(url: str) -> None:
    token_ids: list[int] = []
    arrays = []
    async for event in events(url, BODY):
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        [choice] = event["choices"]
        token_ids += choice["token_ids"]
        if choice["routed_experts"] is not None:
            arrays.append(np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))))
            print(f"tokens {choice['token_ids']}: {len(arrays[-1])} rows")
    if not arrays:
        raise SystemExit("the server returned no routing: it runs with --no-enable-return-routed-experts")
    rows = np.concatenate(arrays)
    assert len(rows) == len(PROMPT) + len(token_ids) - 1
    print(f"{len(token_ids)} tokens, rows {rows.shape} (positions, layers, experts per token), {rows.dtype}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="default: %(default)s")
    try:
        asyncio.run(main(parser.parse_args().url.rstrip("/")))
    except aiohttp.ClientConnectionError as error:
        sys.exit(f"nothing answers: {error}")
