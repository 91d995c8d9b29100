"""The decode service between engine and handoff: what it may not do in the moments in which both change."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from common.engine.grammar import GrammarCompiler
from common.engine.loop import Engine
from common.engine.request import (
    BlocksLeased,
    EngineEvent,
    EngineRequest,
    PrefillsLocally,
    Progress,
    RequestId,
    Work,
)
from common.handoff.lease import LeaseRef
from common.handoff.messages import Generation, TransferId
from common.handoff.receiver import HandoffReceiver
from common.kv.pool import BlockId
from common.pb import decode_pb2, types_pb2
from common.sampling import Finish, FinishReason, SampledToken
from common.worker.bridge import EngineBridge
from common.worker.core import WorkerCore
from common.worker.lifecycle import Lifecycle
from common.worker.metrics import WorkerMetrics
from common.worker.spans import RequestSpans
from decode_worker.intake import Intake
from decode_worker.service import DecodeService

ID = RequestId("r-0")
LEASE = LeaseRef(TransferId(1), Generation(2), "ipc://x", 0, 5.0, "instance")


class FakeEngine:
    """Records commands; the test says when events come."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.requests: list[EngineRequest] = []
        self.submitted = asyncio.Event()

    def submit(self, request: EngineRequest) -> None:
        self.commands.append("submit")
        self.requests.append(request)
        self.submitted.set()

    def abort(self, request_id: RequestId, choice: int | None = None) -> None:
        self.commands.append("abort" if choice is None else f"abort {choice}")

    def cancel(self, request_id: RequestId) -> None:
        self.commands.append("cancel")

    def events_delivered(self) -> None:
        """Nothing waits for it here."""


class FakeReceiver:
    """Grants one lease; revoking it takes until the test says that the last write is over."""

    def __init__(self, engine: FakeEngine) -> None:
        self.granted = asyncio.Event()
        self.revoking = asyncio.Event()
        self.written = asyncio.Event()
        self._engine = engine

    def grant(self, *_: Any, **__: Any) -> LeaseRef:
        self.granted.set()
        return LEASE

    async def revoke(self, transfer_id: TransferId) -> None:
        self.revoking.set()
        await self.written.wait()
        self._engine.commands.append("revoked")


class Rig:
    """A decode service on fakes, and one call of Generate."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.receiver = FakeReceiver(self.engine)
        self.bridge = EngineBridge()
        self.bridge.attach(cast(Engine, self.engine))
        self.bridge.start()
        self.sent: list[decode_pb2.GenerateEvent] = []
        core = SimpleNamespace(
            bridge=self.bridge,
            engine=self.engine,
            description=types_pb2.ModelDescription(routing_enabled=True),
            grammars=GrammarCompiler(None, 300, frozenset()),
            spans=RequestSpans(),
        )
        intake = Intake(cast(Engine, self.engine))
        self.service = DecodeService(
            cast(WorkerCore, core),
            cast(HandoffReceiver, self.receiver),
            intake,
            Lifecycle(),
            local_prefill_max_tokens=7,
        )

    def call(
        self,
        *,
        n: int = 1,
        site: decode_pb2.PrefillSite.ValueType = decode_pb2.PREFILL_SITE_REMOTE,
        feed_id: int = 0,
    ) -> asyncio.Task[None]:
        request = decode_pb2.GenerateRequest(
            request_id=ID,
            token_ids=[1],
            sampling=types_pb2.SamplingParams(n=n),
            prefill_site=site,
            feed_id=feed_id,
            tag=1 if feed_id else 0,
        )
        return asyncio.create_task(self.service.Generate(request, cast(Any, self)))

    async def write(self, event: decode_pb2.GenerateEvent) -> None:
        self.sent.append(event)

    async def tell(self, *events: EngineEvent) -> None:
        """Delivers events as the engine thread does, and lets the loop dispatch them before anything else runs."""
        self.bridge.deliver(list(events))
        await asyncio.sleep(0)

    def local_prefills(self) -> list[str]:
        """Samples of the metric, as the worker shows them."""
        metrics = WorkerMetrics("decode", "d-0")
        self.service.local_prefills.register(metrics)
        return [line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")]


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_no_lease_on_blocks_that_an_abort_is_about_to_free(rig: Rig) -> None:
    call = rig.call()
    await rig.engine.submitted.wait()
    rig.bridge.deliver([BlocksLeased(ID, (BlockId(3),))])
    assert await rig.service.abort(ID)
    await rig.tell(Progress(ID, (), None, Finish(FinishReason.ABORT)))
    await call
    assert not rig.receiver.granted.is_set()
    assert rig.engine.commands == ["submit", "abort", "cancel"]
    assert [event.chunk.finish_reason for event in rig.sent] == [types_pb2.FINISH_REASON_ABORT]
    assert not await rig.service.abort(ID)


async def test_blocks_outlive_the_last_write_however_often_the_call_is_cancelled(rig: Rig) -> None:
    call = rig.call()
    await rig.engine.submitted.wait()
    await rig.tell(BlocksLeased(ID, (BlockId(3),)))
    await rig.receiver.granted.wait()
    call.cancel()
    await rig.receiver.revoking.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert rig.engine.commands == ["submit"]
    rig.receiver.written.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rig.engine.commands == ["submit", "revoked", "cancel"]


async def test_abort_of_a_leased_request_revokes_first(rig: Rig) -> None:
    call = rig.call()
    await rig.engine.submitted.wait()
    await rig.tell(BlocksLeased(ID, (BlockId(3),)))
    await rig.receiver.granted.wait()
    rig.receiver.written.set()
    assert await rig.service.abort(ID)
    await rig.tell(Progress(ID, (), None, Finish(FinishReason.ABORT)))
    await call
    assert rig.engine.commands[:3] == ["submit", "revoked", "abort"]


async def test_choices_are_aborted_one_by_one_and_the_last_one_revokes(rig: Rig) -> None:
    """Until the first tokens are there a choice ends by an abort only; with the last one the handoff is pointless."""
    call = rig.call(n=2)
    await rig.engine.submitted.wait()
    await rig.tell(BlocksLeased(ID, (BlockId(3),)))
    await rig.receiver.granted.wait()
    assert await rig.service.abort(ID, 1)
    await rig.tell(Progress(ID, (), None, Finish(FinishReason.ABORT), 1))
    assert not await rig.service.abort(ID, 2)
    rig.receiver.written.set()
    assert await rig.service.abort(ID, 0)
    await rig.tell(Progress(ID, (), None, Finish(FinishReason.ABORT), 0))
    await call
    assert rig.engine.commands[:4] == ["submit", "abort 1", "revoked", "abort"]
    ends = [event.chunk for event in rig.sent if event.HasField("chunk")]
    assert [(chunk.choice, chunk.finish_reason) for chunk in ends] == [
        (1, types_pb2.FINISH_REASON_ABORT),
        (0, types_pb2.FINISH_REASON_ABORT),
    ]


async def test_an_abort_of_one_choice_does_not_keep_the_others_from_their_lease(rig: Rig) -> None:
    call = rig.call(n=2)
    await rig.engine.submitted.wait()
    assert await rig.service.abort(ID, 0)
    await rig.tell(Progress(ID, (), None, Finish(FinishReason.ABORT), 0))
    await rig.tell(BlocksLeased(ID, (BlockId(3),)))
    await rig.receiver.granted.wait()
    rig.receiver.written.set()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def counted(short_prompt: int, whole_request: int) -> list[str]:
    """The metric's samples in Prometheus' text format."""
    return [
        f'moerelay_local_prefills_total{{cause="{cause}",role="decode",worker="d-0"}} {number:.1f}'
        for cause, number in (("short_prompt", short_prompt), ("whole_request", whole_request))
    ]


async def test_a_prompt_that_is_computed_here_gets_no_lease(rig: Rig) -> None:
    call = rig.call()
    await rig.engine.submitted.wait()
    assert rig.local_prefills() == counted(0, 0)
    await rig.tell(PrefillsLocally(ID, 32))
    await rig.tell(Progress(ID, (SampledToken(5),), None, Finish(FinishReason.LENGTH), num_cached=32))
    await call
    [request] = rig.engine.requests
    assert (request.work, request.local_prefill_max_tokens) == (Work.DECODE, 7)
    assert not rig.receiver.granted.is_set()
    first, last = rig.sent
    assert first == decode_pb2.GenerateEvent(local_prefill=decode_pb2.LocalPrefill(num_cached_tokens=32))
    assert (last.chunk.num_cached_tokens, last.chunk.finish_reason) == (32, types_pb2.FINISH_REASON_LENGTH)
    assert rig.engine.commands == ["submit", "cancel"]
    assert rig.local_prefills() == counted(1, 0)


async def test_nothing_is_said_of_a_local_prefill_that_was_aborted_before(rig: Rig) -> None:
    call = rig.call()
    await rig.engine.submitted.wait()
    rig.bridge.deliver([PrefillsLocally(ID)])
    assert await rig.service.abort(ID)
    await rig.tell(Progress(ID, (), None, Finish(FinishReason.ABORT)))
    await call
    assert [event.chunk.finish_reason for event in rig.sent] == [types_pb2.FINISH_REASON_ABORT]
    assert rig.local_prefills() == counted(0, 0)


async def test_a_whole_request_is_counted_apart_once_its_prompt_is_computed(rig: Rig) -> None:
    with capture_logs() as logs:
        call = rig.call(n=2, site=decode_pb2.PREFILL_SITE_LOCAL)
        await rig.engine.submitted.wait()
        await asyncio.sleep(0)  # the call goes on to where it waits for the first event
        assert rig.local_prefills() == counted(0, 0)
        for choice in range(2):
            await rig.tell(Progress(ID, (SampledToken(5),), None, None, choice, num_cached=48))
            await rig.tell(Progress(ID, (SampledToken(6),), None, Finish(FinishReason.LENGTH), choice))
        await call
    [request] = rig.engine.requests
    assert (request.work, request.local_prefill_max_tokens) == (Work.WHOLE, 0)
    assert rig.local_prefills() == counted(0, 1)
    [told] = [entry for entry in logs if entry["event"] == "local_prefill"]
    assert (told["cause"], told["num_tokens"], told["num_cached"]) == ("whole_request", 1, 48)


async def test_a_whole_request_that_ended_before_its_first_token_is_not_counted(rig: Rig) -> None:
    call = rig.call(site=decode_pb2.PREFILL_SITE_LOCAL)
    await rig.engine.submitted.wait()
    assert await rig.service.abort(ID)
    await rig.tell(Progress(ID, (), None, Finish(FinishReason.ABORT)))
    await call
    assert rig.local_prefills() == counted(0, 0)


async def test_a_request_of_a_feed_that_is_gone_is_numbered_in_its_call(rig: Rig) -> None:
    call = rig.call(feed_id=99)
    await rig.engine.submitted.wait()
    await rig.tell(BlocksLeased(ID, (BlockId(3),)))
    await rig.receiver.granted.wait()
    rig.receiver.written.set()
    await rig.tell(Progress(ID, (SampledToken(5),), None, None))
    await settled()
    await rig.tell(Progress(ID, (SampledToken(6),), None, Finish(FinishReason.LENGTH)))
    await call
    lease, *chunks = rig.sent
    assert lease.HasField("lease")
    assert [event.chunk.seq for event in chunks] == [1, 2]


async def settled() -> None:
    """More turns of the loop than anything here needs."""
    for _ in range(20):
        await asyncio.sleep(0)
