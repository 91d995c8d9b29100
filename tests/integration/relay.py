"""A whole cluster in the test process: router over HTTP, workers over gRPC, handoffs over a chosen transport.

Everything is the product's own code but the assembly, which lets a test put a fault between two parts: a slow network,
a device that stands still, a peer that goes away.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from common.config import DecodeSettings, PrefillSettings, RouterSettings, WorkerSettings
from common.engine.limits import EngineLimits
from common.engine.loop import Engine
from common.engine.objectives import Objectives
from common.handoff.channel import Listener
from common.handoff.receiver import HandoffReceiver
from common.handoff.sender import HandoffSender
from common.kv.pool import BlockPool
from common.model.batch import Runner
from common.model.runner import ModelRunner
from common.pb import decode_pb2_grpc, prefill_pb2_grpc, types_pb2
from common.tracing import open_tracing
from common.worker.bridge import EngineBridge
from common.worker.core import WorkerCore
from common.worker.lifecycle import Lifecycle
from common.worker.machine import WorkerCores
from common.worker.process import add_worker_service, handoff_identity, new_instance_id, running_engine
from common.worker.server import WorkerServer
from common.worker.spans import RequestSpans
from decode_worker.intake import Intake
from decode_worker.metrics import handoff_metrics as receiver_metrics
from decode_worker.self_check.checker import SelfCheck
from decode_worker.service import DecodeService
from prefill_worker.metrics import handoff_metrics as sender_metrics
from prefill_worker.service import PrefillService
from tests.contract.rig import GatedListener
from tests.contract.transports import MemoryTransport, Transport
from tests.e2e.cluster import Client, until
from tests.integration.kit import Kit
from tests.integration.valve import Valve, ValvedConnector
from tests.unit.router.cluster import router_over

#: Opens the control routes in tests that serve them.
ADMIN_KEY = "admin-key"

#: Nobody is given up for silence, however long a busy machine takes: all parts share one process, and its pauses.
PATIENCE_S = 60.0
#: Everything is let go this soon after the last request ended.
BASELINE_S = 30.0


@dataclass(frozen=True)
class WorkerPlan:
    """One worker's settings; `num_blocks` are usable ones, `chunk` is its token budget per step."""

    kit: Kit
    num_blocks: int = 160
    chunk: int = 16
    max_num_seqs: int = 64
    timeout_s: float = PATIENCE_S
    #: Of a decode worker: what a transfer may have in flight, and so the largest chunk of its payload.
    credit_bytes: int = 2**20
    max_message_bytes: int = 64 * 2**20
    routing: bool = True
    prefix_caching: bool = True
    swap_space_bytes: int = 2**30
    #: Of a decode worker.
    local_prefill_max_tokens: int = 0
    objectives: Objectives = field(default_factory=Objectives)
    #: Where its traces go; None: it has none.
    traces: str | None = None
    #: Of a decode worker: makes what checks its requests.
    self_check: Callable[[WorkerCore], SelfCheck] | None = None

    def settings(self, cls: type[WorkerSettings]) -> WorkerSettings:
        return cls(model="in memory", max_message_bytes=self.max_message_bytes, handoff_timeout_s=self.timeout_s)


@dataclass
class WorkerEnd:
    """One running worker."""

    core: WorkerCore
    runner: Runner
    address: str
    instance_id: str
    service: PrefillService | DecodeService
    handoffs: HandoffSender | HandoffReceiver | None

    @property
    def blocks_used(self) -> int:
        return self.core.engine.load().kv_blocks_used

    def is_idle(self) -> bool:
        load = self.core.engine.load()
        held = load.running + load.waiting + load.handoffs + load.kv_blocks_used
        return held == 0 and (self.handoffs is None or self.handoffs.num_active == 0)

    async def violations(self) -> list[str]:
        return await asyncio.to_thread(self.core.engine.check_invariants) + self.service.check_invariants()


@dataclass
class Relay:
    """A running cluster. `prefill` is absent in aggregated mode."""

    client: Client
    decode: WorkerEnd
    prefill: WorkerEnd | None
    valve: Valve
    #: While clear, the decode worker takes nothing from its handoff socket.
    receiving: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prefiller(self) -> WorkerEnd:
        assert self.prefill is not None, "aggregated mode has no prefill worker"
        return self.prefill

    async def assert_baseline(self, within_s: float = BASELINE_S) -> None:
        """Nothing is held by anybody, and every part is consistent."""
        ends = [self.decode] if self.prefill is None else [self.decode, self.prefill]

        async def idle() -> bool:
            view = await self.client.json("/cluster")
            return view["router"]["in_flight"] == 0 and all(end.is_idle() for end in ends)

        await until(idle, within_s)
        for end in ends:
            assert await end.violations() == []


@asynccontextmanager
async def running_relay(
    decode: WorkerPlan, prefill: WorkerPlan | None, transport: Transport | None = None, **router: Any
) -> AsyncIterator[Relay]:
    """One decode and one prefill worker behind a router, `router` being its settings; without `prefill`: role both."""
    transport, valve, receiving = transport or MemoryTransport(), Valve(), asyncio.Event()
    receiving.set()
    async with AsyncExitStack() as stack:
        listener = None if prefill is None else GatedListener(transport.listen(), receiving)
        decode_end = await stack.enter_async_context(_decode_worker(decode, listener))
        prefill_end = None
        if prefill is not None:
            connector = ValvedConnector(transport.connector(), valve)
            prefill_end = await stack.enter_async_context(_prefill_worker(prefill, connector))
        addresses = {
            "decode": [decode_end.address],
            "prefill": [prefill_end.address] if prefill_end else [],
        }
        timeouts = {"heartbeat_timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S}
        settings = RouterSettings(**{**addresses, "heartbeat_interval_s": 0.05, **timeouts, **router})
        _, url = await stack.enter_async_context(router_over(settings))
        timeout = aiohttp.ClientTimeout(total=60)
        # No limit on connections: a request that waits in the client's pool would tell nothing.
        pool = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=pool))
        yield Relay(Client(session, url), decode_end, prefill_end, valve, receiving)


def _core(plan: WorkerPlan) -> tuple[WorkerCore, Runner]:
    kit = plan.kit
    store = kit.make_store(plan.num_blocks + 1)
    runner, bridge = kit.make_runner(store), EngineBridge()
    limits = EngineLimits(
        max_num_batched_tokens=plan.chunk,
        max_num_seqs=plan.max_num_seqs,
        max_waiting=1000,
        max_model_len=kit.max_model_len,
        vocab_size=kit.vocab_size,
        swap_space_bytes=plan.swap_space_bytes,
        objectives=plan.objectives,
    )
    engine = Engine(
        runner,
        store,
        BlockPool(plan.num_blocks + 1),
        limits,
        kit.eos_token_ids,
        bridge.deliver,
        prefix_caching=plan.prefix_caching,
    )
    bridge.attach(engine)
    weights = kit.weights(runner, engine, routing=plan.routing)
    make_solo = runner.beside if isinstance(runner, ModelRunner) else kit.make_runner
    return WorkerCore(weights, WorkerCores("0", 1), True, store, engine, bridge, kit.grammars(), make_solo), runner


async def _spans(plan: WorkerPlan, stack: AsyncExitStack, service: str) -> RequestSpans:
    return RequestSpans(await stack.enter_async_context(open_tracing(plan.traces, 1.0, service=service)))


@asynccontextmanager
async def _decode_worker(plan: WorkerPlan, listener: Listener | None) -> AsyncIterator[WorkerEnd]:
    (core, runner), lifecycle, instance_id = _core(plan), Lifecycle(), new_instance_id()
    settings = plan.settings(DecodeSettings)
    async with AsyncExitStack() as stack:
        core = replace(core, spans=await _spans(plan, stack, "decode"))
        intake = Intake(core.engine, core.spans)
        self_check = None if plan.self_check is None else plan.self_check(core)
        if self_check is not None:
            stack.callback(self_check.close)
        await stack.enter_async_context(running_engine(core))
        receiver = None
        if listener is not None:
            stack.push_async_callback(listener.close)
            receiver = await stack.enter_async_context(
                HandoffReceiver(
                    listener,
                    core.store,
                    lambda: handoff_identity(core, instance_id),
                    timeout_s=plan.timeout_s,
                    credit_bytes=plan.credit_bytes,
                    known_versions=lambda: core.engine.known_weight_versions,
                    handler=intake,
                    tracing=core.spans.tracing,
                )
            )
        service = DecodeService(
            core,
            receiver,
            intake,
            lifecycle,
            local_prefill_max_tokens=plan.local_prefill_max_tokens,
            self_check=self_check,
        )
        server = WorkerServer(settings, lifecycle)
        role = types_pb2.ROLE_BOTH if receiver is None else types_pb2.ROLE_DECODE
        _, metrics = add_worker_service(
            server, settings, core, lifecycle, role=role, role_service=service, instance_id=instance_id
        )
        if receiver is not None:
            receiver_metrics(metrics, receiver, intake)
            service.local_prefills.register(metrics)
        if self_check is not None:
            self_check.register(metrics)
        decode_pb2_grpc.add_DecodeServicer_to_server(service, server.grpc)
        await stack.enter_async_context(_started(server))
        yield WorkerEnd(core, runner, server.address, instance_id, service, receiver)


@asynccontextmanager
async def _prefill_worker(plan: WorkerPlan, connector: ValvedConnector) -> AsyncIterator[WorkerEnd]:
    (core, runner), lifecycle, instance_id = _core(plan), Lifecycle(), new_instance_id()
    settings = plan.settings(PrefillSettings)
    async with AsyncExitStack() as stack:
        core = replace(core, spans=await _spans(plan, stack, "prefill"))
        await stack.enter_async_context(running_engine(core))
        stack.push_async_callback(connector.close)
        sender = await stack.enter_async_context(
            HandoffSender(connector, core.store, lambda: handoff_identity(core, instance_id), timeout_s=plan.timeout_s)
        )
        service, server = PrefillService(core, sender, lifecycle), WorkerServer(settings, lifecycle)
        _, metrics = add_worker_service(
            server,
            settings,
            core,
            lifecycle,
            role=types_pb2.ROLE_PREFILL,
            role_service=service,
            instance_id=instance_id,
        )
        sender_metrics(metrics, service.stats)
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.grpc)
        await stack.enter_async_context(_started(server))
        yield WorkerEnd(core, runner, server.address, instance_id, service, sender)


@asynccontextmanager
async def _started(server: WorkerServer) -> AsyncIterator[None]:
    await server.grpc.start()
    try:
        yield
    finally:
        await server.grpc.stop(None)
