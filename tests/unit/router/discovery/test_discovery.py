"""A router whose workers appear, move and disappear while it serves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from common.config import RouterSettings
from common.pb import types_pb2
from router.fleet import Fleet
from router.keys import FLEET
from tests.fakes.fake_resolver import FakeResolver
from tests.fakes.fake_workers import FakeWorker, Script, serving
from tests.unit.router.cluster import PATIENT, Cluster, router_over

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


@dataclass
class Listed:
    """A router that reads its workers from two files."""

    folder: Path
    script: Script = field(default_factory=Script)

    def write(self, side: str, *workers: FakeWorker) -> None:
        partial = self.folder / "partial"
        partial.write_text("".join(f"{worker.address}\n" for worker in workers))
        partial.replace(self.folder / side)

    @asynccontextmanager
    async def router(self, **settings: Any) -> AsyncIterator[Cluster]:
        configured = RouterSettings(
            prefill=[f"file://{self.folder}/prefill"],
            decode=[f"file://{self.folder}/decode"],
            discovery_interval_s=0.01,
            heartbeat_interval_s=0.02,
            model=None,
            **PATIENT | settings,
        )
        async with router_over(configured) as (app, url), aiohttp.ClientSession(url) as http:
            yield Cluster(app, url, http, [], [])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # a worker, a file and a name server have no common event
            await asyncio.sleep(0.005)


def addresses(fleet: Fleet) -> list[str]:
    return [worker.address for worker in fleet.workers]


async def test_workers_appear_move_and_disappear(tmp_path: Path) -> None:
    listed = Listed(tmp_path)
    prefill, decode = FakeWorker("prefill-0", PREFILL, listed.script), FakeWorker("decode-0", DECODE, listed.script)
    other = FakeWorker("decode-1", DECODE, listed.script)
    async with listed.router() as cluster, AsyncExitStack() as stack:
        fleet = cluster.app[FLEET]
        await until(lambda: all(listing.failure for listing in fleet.listings))
        status, answer = await cluster.get("/ready")
        assert status == 503
        assert f"file://{tmp_path}/prefill lists no prefill worker: " in answer["error"]["message"]
        await stack.enter_async_context(serving(prefill))
        async with serving(decode):
            listed.write("prefill", prefill)
            listed.write("decode", decode)
            await until(fleet.can_serve)
            await cluster.canary()
            _, view = await cluster.get("/cluster")
            assert {worker["address"]: worker["source"] for worker in view["workers"]} == {
                prefill.address: f"file://{tmp_path}/prefill",
                decode.address: f"file://{tmp_path}/decode",
            }
        was = decode.address
        async with serving(decode):  # the same worker, on another port
            assert decode.address != was
            listed.write("decode", decode)
            await until(lambda: fleet.can_serve() and was not in addresses(fleet))
            await cluster.canary()
            async with serving(other):
                listed.write("decode", decode, other)
                await until(lambda: sum(worker.usable for worker in fleet.workers) == 3)
                # Which of two that are idle is next depends on what their last heartbeats still counted.
                async with asyncio.timeout(30):
                    while not other.decode_requests:
                        await cluster.canary()
            listed.write("decode", decode)
            await until(lambda: addresses(fleet) == [prefill.address, decode.address])
            await cluster.canary()


async def test_a_stream_outlives_the_listing_of_its_worker(tmp_path: Path) -> None:
    listed = Listed(tmp_path)
    prefill, decode = FakeWorker("prefill-0", PREFILL, listed.script), FakeWorker("decode-0", DECODE, listed.script)
    successor = FakeWorker("decode-1", DECODE, Script())
    async with serving(prefill), serving(decode), serving(successor), listed.router() as cluster:
        fleet = cluster.app[FLEET]
        listed.write("prefill", prefill)
        listed.write("decode", decode)
        await until(fleet.can_serve)
        listed.script.hold_after = 1
        live = asyncio.create_task(cluster.generate([5, 6, 7], temperature=0, max_tokens=4))
        await until(lambda: decode.num_chunks > 0)
        listed.write("decode", successor)
        await until(lambda: addresses(fleet) == [prefill.address, successor.address, decode.address])
        await until(lambda: fleet.workers[1].usable)
        async with cluster.http.get("/metrics") as response:
            exposition = await response.text()
        for metric, value in (("workers", "1.0"), ("failing", "0.0")):
            labels = f'{{role="decode",source="file://{tmp_path}/decode"}}'
            assert f"moerelay_discovery_{metric}{labels} {value}\n" in exposition
        _, view = await cluster.get("/cluster")
        assert [worker["state"] for worker in view["workers"]] == ["healthy", "healthy", "draining"]
        await cluster.canary()
        assert (len(decode.decode_requests), len(successor.decode_requests)) == (1, 1)
        listed.script.release.set()
        assert len((await live)["choices"][0]["token_ids"]) == 4
        await until(lambda: decode.address not in addresses(fleet))


async def test_a_role_without_any_worker_is_counted(tmp_path: Path) -> None:
    """0 before one was found, and after the last one has died and is forgotten: a series that ends alerts nobody."""
    listed = Listed(tmp_path)
    decode = FakeWorker("decode-0", DECODE, listed.script)

    async def usable() -> dict[str, str]:
        async with cluster.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if line.startswith("moerelay_workers_usable{"))

    nobody = {f'moerelay_workers_usable{{role="{role}"}}': "0.0" for role in ("prefill", "decode")}
    async with listed.router() as cluster:
        fleet = cluster.app[FLEET]
        assert await usable() == nobody
        async with serving(decode):
            listed.write("decode", decode)
            await until(lambda: any(worker.usable for worker in fleet.workers))
            assert await usable() == nobody | {'moerelay_workers_usable{role="decode"}': "1.0"}
        listed.write("decode")
        await until(lambda: not fleet.workers)
        assert await usable() == nobody


async def test_nobody_falls_back_before_prefill_workers_have_been_looked_up() -> None:
    script = Script()
    prefill, decode = FakeWorker("prefill-0", PREFILL, script), FakeWorker("decode-0", DECODE, script)
    async with serving(prefill), serving(decode):
        resolver = FakeResolver(prefill.address)
        settings = RouterSettings(
            prefill=["dns://prefill:7001"], decode=[decode.address], allow_aggregated_fallback=True, model=None
        )
        fleet = Fleet(settings, {"dns://prefill:7001": resolver}.get)
        await fleet.refresh()
        assert (fleet.falls_back(), fleet.can_serve()) == (False, False)
        async with fleet.running():
            await until(fleet.can_serve)
            assert not fleet.falls_back()


async def test_a_name_that_nobody_knows_is_asked_for_again() -> None:
    script = Script()
    async with serving(FakeWorker("decode-0", types_pb2.ROLE_BOTH, script)) as both:
        resolver = FakeResolver(both.address)
        resolver.failure = "no name server answers"
        settings = RouterSettings(decode=["dns://both:7002"], discovery_interval_s=0.001, model=None)
        fleet = Fleet(settings, {"dns://both:7002": resolver}.get)
        async with fleet.running():
            await until(lambda: resolver.num_lookups > 2)
            resolver.failure = None
            await until(fleet.can_serve)
