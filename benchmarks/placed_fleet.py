"""Plays conversations on a real cluster and reads what its workers say of their caches and of their work."""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.conversations import Conversation
from benchmarks.server import serving
from benchmarks.simulated_fleet import Outcome
from common.setting_types import PlacementName

FLAGS = ("--prefill", "2", "--decode", "2", "--threads", "1", "--dtype", "float32")


async def measure(model: Path, name: PlacementName, trace: Sequence[Conversation]) -> Outcome:
    """Starts a cluster with this policy and plays the trace in real time."""
    command = [sys.executable, "-m", "deploy.cli", "up", "--model", str(model), "--port", "{port}", *FLAGS]
    async with (
        serving([*command, "--placement", name], log=model.parent / "up.log") as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        player = _Player(session, server.url)
        await asyncio.gather(*(player.play(conversation) for conversation in trace))
        return await player.outcome()


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Event(msgspec.Struct):
    choices: list[_Choice]


class _Player:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._ttfts_s: list[float] = []

    async def play(self, conversation: Conversation) -> None:
        """The next prompt holds the real output of the one before."""
        await asyncio.sleep(conversation.begins_s)
        said: list[int] = []
        for at, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.pause_s)
            spoken = conversation.until_after(at - 1) if at else []
            said += conversation.prompt(at)[len(spoken) :]
            said += await self._generate(conversation.name, said, turn.num_output_tokens)

    async def _generate(self, session: str, prompt: list[int], num_tokens: int) -> list[int]:
        """The output; the first event tells when the first token came."""
        sampling = {"max_tokens": num_tokens, "ignore_eos": True, "return_routed_experts": False, "temperature": 0}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
        began, tokens = time.perf_counter(), list[int]()
        url, headers = f"{self._url}/inference/v1/generate", {"X-Session-Id": session}
        async with self._session.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = msgspec.json.decode(line.removeprefix(b"data: "), type=_Event)
                    if not tokens:
                        self._ttfts_s.append(time.perf_counter() - began)
                    tokens += [token for choice in event.choices for token in choice.token_ids]
        return tokens

    async def outcome(self) -> Outcome:
        async with self._session.get(f"{self._url}/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))

        def by_worker(name: str, role: str) -> list[int]:
            samples = [sample for family in families for sample in family.samples if sample.name == name]
            return [int(sample.value) for sample in samples if sample.labels.get("role") == role]

        return Outcome(
            prefill_work=by_worker("moerelay_prompt_tokens_computed_total", "prefill"),
            decode_work=by_worker("moerelay_generated_tokens_total", "decode"),
            num_prompt_tokens=sum(by_worker("moerelay_prefix_cache_queries_tokens_total", "prefill")),
            prefill_hits=sum(by_worker("moerelay_prefix_cache_hit_tokens_total", "prefill")),
            decode_hits=sum(by_worker("moerelay_prefix_cache_hit_tokens_total", "decode")),
            ttfts_s=self._ttfts_s,
        )
