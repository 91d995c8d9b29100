"""Workers come and go under load, each new one at a new address, and no request fails."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.model.synthesize import synthesize
from tests.e2e.cluster import Client
from tests.e2e.conftest import TINY
from tests.e2e.fleet import Fleet, client_of, running_fleet, until_healthy
from tests.e2e.test_routing_rows import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("churn"), pytest.mark.timeout(600)]

NUM_CLIENTS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "m"
    synthesize("qwen3_moe", "tiny", 7, TINY | {"max_position_embeddings": 1024}, path)
    return path


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(model, tmp_path) as running:
        running.complete()
        yield running


@dataclass
class Load:
    """Clients that send one request after the other until they are told to stop."""

    client: Client
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    num_finished: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self) -> None:
        await asyncio.gather(*(self._send(random.Random(number)) for number in range(NUM_CLIENTS)))

    async def _send(self, chance: random.Random) -> None:
        while not self.stop.is_set():
            num_tokens = chance.choice((1, 8, 40, 300))
            prompt = prompt_of(chance.randrange(1, 200), chance.randrange(10**6))
            stream = chance.random() < 0.7
            answer = await self.client.generate(prompt, stream=stream, max_tokens=num_tokens, ignore_eos=True)
            if answer.error is not None or len(answer.token_ids) != num_tokens:
                self.failures.append(f"{answer.status} {answer.error} after {len(answer.token_ids)} of {num_tokens}")
            self.num_finished += 1


@pytest.mark.parametrize(
    ("period_s", "num_changes"), [(2.0, 3), pytest.param(5.0, 12, marks=pytest.mark.slow)], ids=["15 s", "60 s"]
)
async def test_workers_are_replaced_one_after_the_other(fleet: Fleet, period_s: float, num_changes: int) -> None:
    """Every `period_s` one worker is stopped and another started, prefill and decode workers in turn.

    It is stopped with SIGTERM only, as every orchestrator does, and stays on the list for a while.
    """
    loop = asyncio.get_running_loop()
    async with client_of(fleet) as client:
        await until_healthy(client, *fleet.workers)
        addresses = {worker.address for worker in fleet.workers}
        load = Load(client)
        sending = asyncio.create_task(load.run())
        leaving = []
        for number in range(num_changes):
            next_change = loop.time() + period_s
            old = fleet.of("prefill" if number % 2 else "decode")[0]
            new = fleet.launch(old.role or "decode")
            old.terminate()
            assert await asyncio.to_thread(old.popen.wait, 40) == 0, old.last_lines()
            leaving.append(old)
            await asyncio.to_thread(fleet.admit, new)
            fleet.drop(old)
            await until_healthy(client, new)
            assert new.address not in addresses
            addresses.add(new.address)
            await asyncio.sleep(max(0.0, next_change - loop.time()))  # the load itself: how often something changes
        load.stop.set()
        await asyncio.wait_for(sending, 60)
        assert load.failures == []
        assert load.num_finished > 20 * num_changes
