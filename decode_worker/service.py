"""The Decode gRPC service: one streamed choice, prefilled here or handed over by a prefill worker."""

import asyncio
from typing import Any

import grpc
import structlog

from common.engine.request import EngineRequest, RequestId, Work
from common.errors import InvalidRequestError, UnavailableError
from common.handoff.leases import LeaseRef
from common.handoff.receiver import HandoffReceiver
from common.messages import finish_to_pb, sampling_from_pb, token_to_pb
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2
from common.routing.record import RoutingArray
from common.worker.core import WorkerCore
from common.worker.lifecycle import Lifecycle
from decode_worker.intake import Intake
from decode_worker.outbox import Batch, Outbox

log = structlog.get_logger()

#: Rows per message: keeps one message of a long prompt's rows far below the gRPC limit and the router responsive.
MAX_ROW_BYTES_PER_MESSAGE = 2**20

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

    async def abort(self, request_id: RequestId) -> bool:
        """Ends the choice with finish_reason "abort"; a handoff that is still arriving is revoked first."""
        if request_id not in self._live:
            return False
        await self._revoke(self._live[request_id])
        self._core.engine.abort(request_id)
        return True

    def check_invariants(self) -> list[str]:
        return [] if self._receiver is None else self._receiver.check_invariants()

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """A coroutine that writes to `context`, not a generator: cancelling the call unwinds it at once."""
        remote = request.prefill_site == decode_pb2.PREFILL_SITE_REMOTE
        engine_request = self._engine_request(request, Work.DECODE if remote else Work.WHOLE)
        outbox = Outbox()
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

    def _engine_request(self, request: decode_pb2.GenerateRequest, work: Work) -> EngineRequest:
        if work is Work.DECODE and self._receiver is None:
            raise InvalidRequestError("this worker takes no handoffs (role both)", param="prefill_site")
        if request.routing.enabled and not self._core.description.routing_enabled:
            raise UnavailableError("routing was asked for, but this worker runs with it switched off")
        return EngineRequest(
            request_id=RequestId(request.request_id),
            prompt=tuple(request.token_ids),
            sampling=sampling_from_pb(request.sampling),
            routing_start=request.routing.start if request.routing.enabled else None,
            work=work,
        )

    async def _lease(self, request: EngineRequest, outbox: Outbox, context: Context) -> None:
        """Waits for blocks, then invites the handoff; does nothing if the request was aborted while it waited."""
        assert self._receiver is not None
        blocks = await outbox.leased()
        if blocks is None:
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
        while True:
            batch = await outbox.take()
            for chunk in _chunks(batch):
                await context.write(decode_pb2.GenerateEvent(chunk=chunk))
            if batch.finish is not None:
                return

    async def _free(self, request_id: RequestId) -> None:
        """The blocks go back to the pool only when no write of the handoff can touch them any more."""
        self._intake.forget(request_id)
        try:
            await asyncio.shield(self._revoke(self._live.pop(request_id)))
        finally:
            self._core.engine.cancel(request_id)

    async def _revoke(self, lease: LeaseRef | None) -> None:
        if lease is not None and self._receiver is not None:
            await self._receiver.revoke(lease.transfer_id)


def _chunks(batch: Batch) -> list[decode_pb2.TokenChunk]:
    """One batch as messages: surplus rows first, tokens and finish reason with the last rows."""
    rows_TLK = batch.rows_TLK
    if rows_TLK is None:
        return [_chunk(batch, None)]
    step = max(1, MAX_ROW_BYTES_PER_MESSAGE // rows_TLK[0].nbytes)
    pieces = [rows_TLK[at : at + step] for at in range(0, len(rows_TLK), step)]
    return [*(_chunk(Batch(), piece) for piece in pieces[:-1]), _chunk(batch, pieces[-1])]


def _chunk(batch: Batch, rows_TLK: RoutingArray | None) -> decode_pb2.TokenChunk:
    fields: dict[str, Any] = {} if batch.finish is None else {"stop_token_id": batch.finish.stop_token_id}
    return decode_pb2.TokenChunk(
        tokens=[token_to_pb(token) for token in batch.tokens],
        routing_rows=b"" if rows_TLK is None else _little_endian(rows_TLK),
        num_rows=0 if rows_TLK is None else len(rows_TLK),
        finish_reason=finish_to_pb(None if batch.finish is None else batch.finish.reason),
        **fields,
    )


def _little_endian(rows_TLK: RoutingArray) -> bytes:
    return rows_TLK.astype(rows_TLK.dtype.newbyteorder("<"), order="C", copy=False).tobytes()
