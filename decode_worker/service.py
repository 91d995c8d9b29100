"""The Decode gRPC service: one streamed choice, prefilled here or handed over by a prefill worker."""

import asyncio
from functools import partial

import grpc
import structlog

from common.engine.request import EngineRequest, RequestId, Work
from common.errors import InvalidRequestError
from common.handoff.leases import LeaseRef
from common.handoff.receiver import HandoffReceiver
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2
from common.worker.core import WorkerCore
from common.worker.lifecycle import Lifecycle
from common.worker.requests import engine_request as to_engine_request
from decode_worker.chunks import Chunker
from decode_worker.intake import Intake
from decode_worker.outbox import Outbox

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Streams one choice per call; whatever ends the call frees the request's blocks and lease."""

    def __init__(
        self, core: WorkerCore, receiver: HandoffReceiver | None, intake: Intake, lifecycle: Lifecycle
    ) -> None:
        self._core = core
        self._receiver = receiver
        self._intake = intake
        self._lifecycle = lifecycle
        self._live: dict[RequestId, LeaseRef | None] = {}
        #: Live ids that get no lease any more: the engine is about to free their blocks.
        self._aborted: set[RequestId] = set()
        self._freeing: set[asyncio.Task[None]] = set()

    async def abort(self, request_id: RequestId) -> bool:
        """Ends the choice with finish_reason "abort"; a handoff that is still arriving is revoked first."""
        if request_id not in self._live:
            return False
        self._aborted.add(request_id)
        await self._revoke(self._live[request_id])
        self._core.engine.abort(request_id)
        return True

    def live_requests(self) -> list[RequestId]:
        return list(self._live)

    def check_invariants(self) -> list[str]:
        return [] if self._receiver is None else self._receiver.check_invariants()

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """A coroutine that writes to `context`, not a generator: cancelling the call unwinds it at once."""
        remote = request.prefill_site == decode_pb2.PREFILL_SITE_REMOTE
        if remote and self._receiver is None:
            raise InvalidRequestError("this worker takes no handoffs (role both)", param="prefill_site")
        work = Work.DECODE if remote else Work.WHOLE
        outbox, engine_request = Outbox(), to_engine_request(request, work, self._core.description)
        with (
            self._lifecycle.serving(),
            self._core.bridge.subscribed(engine_request.request_id, outbox),
            structlog.contextvars.bound_contextvars(request_id=engine_request.request_id),
        ):
            self._live[engine_request.request_id] = None
            try:
                self._core.engine.submit(engine_request)
                if remote:
                    await self._lease(engine_request, outbox, context)
                await self._stream(outbox, context)
            finally:
                await self._free(engine_request.request_id)

    async def _lease(self, request: EngineRequest, outbox: Outbox, context: Context) -> None:
        """Waits for blocks, then invites the handoff; does nothing if the request was aborted while it waited."""
        assert self._receiver is not None
        blocks = await outbox.leased()
        if blocks is None or request.request_id in self._aborted:
            return
        self._intake.expect(request.request_id, outbox)
        lease = self._receiver.grant(
            request.request_id,
            blocks,
            num_tokens=len(request.prompt),
            num_cached=0,
            routing=request.routing_start is not None,
        )
        self._live[request.request_id] = lease
        await context.write(
            decode_pb2.GenerateEvent(
                lease=prefill_pb2.Lease(
                    transfer_id=lease.transfer_id,
                    generation=lease.generation,
                    endpoint=lease.endpoint,
                    num_cached_tokens=lease.num_cached_tokens,
                    timeout_s=lease.timeout_s,
                    instance_id=lease.instance_id,
                )
            )
        )

    async def _stream(self, outbox: Outbox, context: Context) -> None:
        chunker = Chunker()
        while True:
            batch = await outbox.take()
            for chunk in chunker.cut(batch):
                await context.write(decode_pb2.GenerateEvent(chunk=chunk))
            if batch.finish is not None:
                return

    async def _free(self, request_id: RequestId) -> None:
        """The blocks go back to the pool only when no write of the handoff can touch them any more.

        A task of its own, because a call that is cancelled twice must not cut it short.
        """
        self._intake.forget(request_id)
        self._aborted.discard(request_id)
        freeing = asyncio.create_task(self._revoke(self._live.pop(request_id)))
        self._freeing.add(freeing)
        freeing.add_done_callback(partial(self._freed, request_id))
        await asyncio.shield(freeing)

    def _freed(self, request_id: RequestId, freeing: asyncio.Task[None]) -> None:
        self._freeing.discard(freeing)
        self._core.engine.cancel(request_id)

    async def _revoke(self, lease: LeaseRef | None) -> None:
        if lease is not None and self._receiver is not None:
            await self._receiver.revoke(lease.transfer_id)
