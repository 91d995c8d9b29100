"""What a router says about falling back, and a prefill worker that may leave."""

import re
from contextlib import AsyncExitStack
from typing import Any

import grpc

from common.pb import types_pb2
from router.keys import FLEET
from tests.fakes.fake_workers import FakeWorker, Script, serving
from tests.unit.router.cluster import Cluster, over

#: However long a busy machine takes: nobody falls silent, and who refuses connections is found out at once.
UNHURRIED = {"heartbeat_interval_s": 60, "heartbeat_timeout_s": 60, "connect_timeout_s": 60}

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


async def fallbacks(cluster: Cluster) -> float:
    """How often the router says that it fell back."""
    async with cluster.http.get("/metrics") as response:
        found = re.search(r"^moerelay_aggregated_fallbacks_total (\S+)$", await response.text(), re.M)
    assert found
    return float(found[1])


async def says(cluster: Cluster) -> tuple[bool, bool, bool]:
    """What /ready, /health and /cluster say about falling back, in a cluster that serves."""
    answers = [await cluster.get(path) for path in ("/ready", "/health")]
    assert [status for status, _ in answers] == [200, 200]
    _, view = await cluster.get("/cluster")
    assert view["router"]["ready"] is True
    return answers[0][1]["fallback"], answers[1][1]["fallback"], view["router"]["fallback"]


class MortalPrefill(AsyncExitStack):
    """A pair whose prefill worker stops when the inner stack is closed. Heartbeats are the test's."""

    def __init__(self, script: Script, **settings: Any) -> None:
        super().__init__()
        self._script, self._settings = script, UNHURRIED | settings

    async def __aenter__(self) -> tuple[Cluster, AsyncExitStack]:  # type: ignore[override]
        server = await self.enter_async_context(AsyncExitStack())
        mortal = await server.enter_async_context(serving(FakeWorker("prefill-0", PREFILL, self._script)))
        decode = FakeWorker("decode-0", DECODE, self._script)
        prefill = [mortal.address, *self._settings.pop("prefill", [])]
        cluster = await self.enter_async_context(over([], [decode], prefill=prefill, **self._settings))
        return cluster, server


async def leave(cluster: Cluster, server: AsyncExitStack) -> None:
    """Stops the prefill worker of a MortalPrefill; returns when the router's connection to it is gone.

    Until then the router would begin a request there, and the decode worker of these tests needs no handoff to answer.
    """
    await server.aclose()
    channel = cluster.app[FLEET].workers[0].channel
    while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
