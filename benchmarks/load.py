"""The load that the serving benchmarks send: random token prompts in, streamed tokens out, timed where they arrive."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from deploy.client import ClusterClient

#: Prompts are drawn from ids that are ordinary tokens in every vocabulary of this size or larger.
_FIRST_ID, _LAST_ID = 300, 31_000

DECODE_PROMPT_TOKENS = 32
DECODE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When the request was sent and when each of its tokens arrived, in seconds of `time.perf_counter`."""

    sent: float
    tokens: tuple[float, ...]


class LoadGenerator:
    """Sends greedy requests of a fixed length. No prompt occurs twice, so that no prefix cache helps.

    Args:
        sampling: sampling parameters on top of those.
    """

    def __init__(self, client: ClusterClient, sampling: Mapping[str, Any] | None = None) -> None:
        self._client = client
        self._sampling = dict(sampling or {})
        self._random = random.Random()

    async def warm_up(self) -> None:
        """Lets the server compile, allocate and connect what it does once."""
        for num_tokens in (64, 512):
            await self.request(num_tokens, 8)
        await asyncio.gather(*(self.request(16, 8) for _ in range(16)))

    async def time_to_first_token(self, num_prompt_tokens: int) -> float:
        """Seconds, for one request alone; it asks for a second token, so that the first is not the last event."""
        arrivals = await self.request(num_prompt_tokens, 2)
        return arrivals.tokens[0] - arrivals.sent

    async def decode_rate(self, concurrency: int) -> float:
        """Tokens per second of all streams together, while all of them decode."""
        requests = (self.request(DECODE_PROMPT_TOKENS, DECODE_TOKENS) for _ in range(concurrency))
        streams = await asyncio.gather(*requests)
        start = max(stream.tokens[0] for stream in streams)
        end = min(stream.tokens[-1] for stream in streams)
        if end <= start:
            raise RuntimeError(
                f"{concurrency} requests were never decoded at the same time; does the server queue them?"
            )
        return sum(start < arrival <= end for stream in streams for arrival in stream.tokens) / (end - start)

    async def request(self, num_prompt_tokens: int, num_tokens: int) -> Arrivals:
        """One request with a prompt of its own, to its end."""
        arrivals: list[float] = []
        sent = time.perf_counter()
        async for now, count in self.arrivals(num_prompt_tokens, num_tokens):
            arrivals += [now] * count
        if len(arrivals) != num_tokens:
            raise RuntimeError(f"asked for {num_tokens} tokens, {len(arrivals)} came")
        return Arrivals(sent, tuple(arrivals))

    async def arrivals(self, num_prompt_tokens: int, num_tokens: int) -> AsyncGenerator[tuple[float, int]]:
        """The same as it comes: when an event with tokens arrived, and how many it has. Close it to break it off."""
        prompt = self.token_ids(num_prompt_tokens)
        sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **self._sampling}
        async with aclosing(self._client.stream({"token_ids": prompt, "sampling_params": sampling})) as events:
            async for event in events:
                now = time.perf_counter()
                if count := sum(len(choice["token_ids"] or ()) for choice in event["choices"]):
                    yield now, count

    def token_ids(self, count: int) -> list[int]:
        """Random ones."""
        return [self._random.randint(_FIRST_ID, _LAST_ID) for _ in range(count)]
