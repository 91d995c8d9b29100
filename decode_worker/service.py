"""The Decode gRPC service: the streamed choices of one prompt, prefilled here or handed over by a prefill worker."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import grpc
import structlog

from common.engine.request import BlocksLeased, EngineRequest, PrefillsLocally, RequestId, Work
from common.errors import InvalidRequestError
from common.handoff.leases import LeaseRef
from common.handoff.receiver import HandoffReceiver
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2
from common.worker.core import WorkerCore
from common.worker.lifecycle import Lifecycle
from common.worker.requests import engine_request as to_engine_request
from decode_worker.chunks import Chunker
from decode_worker.intake import Intake
from decode_worker.local_prefills import Cause, LocalPrefills
from decode_worker.outbox import Outbox

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]


@dataclass(slots=True)
class _Call:
    """One live request, as far as an abort must know it."""

    num_choices: int
    lease: LeaseRef | None = None
    #: Choices that were aborted.
    aborted: set[int] = field(default_factory=set)

    @property
    def is_aborted(self) -> bool:
        """All of it: it gets no lease any more, because the engine is about to free its blocks."""
        return len(self.aborted) == self.num_choices


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Streams all choices of one prompt per call; whatever ends the call frees the request's blocks and lease.

    Where a handoff could be taken, prompts of which no more than `local_prefill_max_tokens` are missing from the prefix
    cache are computed here nevertheless.
    """

    def __init__(
        self,
        core: WorkerCore,
        receiver: HandoffReceiver | None,
        intake: Intake,
        lifecycle: Lifecycle,
        *,
        local_prefill_max_tokens: int = 0,
    ) -> None:
        self.local_prefills = LocalPrefills()
        self._core = core
        self._receiver = receiver
        self._intake = intake
        self._lifecycle = lifecycle
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._live: dict[RequestId, _Call] = {}
        self._freeing: set[asyncio.Task[None]] = set()

    async def abort(self, request_id: RequestId, choice: int | None = None) -> bool:
        """Ends the request, or one choice, with finish_reason "abort"; a handoff that nobody awaits is revoked first.

        False if no such request is live.
        """
        call = self._live.get(request_id)
        if call is None or not 0 <= (choice or 0) < call.num_choices:
            return False
        call.aborted.update(range(call.num_choices) if choice is None else {choice})
        if not call.is_aborted:
            self._core.engine.abort(request_id, choice)
            return True
        await self._revoke(call.lease)
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
        work, request_id = Work.DECODE if remote else Work.WHOLE, RequestId(request.request_id)
        outbox = Outbox(request.sampling.n)
        with (
            self._lifecycle.serving(),
            self._core.bridge.subscribed(request_id, outbox),
            structlog.contextvars.bound_contextvars(request_id=request_id),
            self._core.spans.served("decode", request_id, context),
        ):
            call = self._live[request_id] = _Call(request.sampling.n)
            try:
                engine_request = await to_engine_request(
                    request,
                    work,
                    self._core.description,
                    self._core.grammars,
                    local_prefill_max_tokens=self._local_prefill_max_tokens if remote else 0,
                )
                self._core.engine.submit(engine_request)
                # Aborts that came before the engine knew the request.
                for choice in sorted(call.aborted):
                    self._core.engine.abort(request_id, choice)
                if remote:
                    await self._admit(engine_request, call, outbox, context)
                await self._stream(call, outbox, context, None if remote else engine_request)
            finally:
                await self._free(request_id)

    async def _admit(self, request: EngineRequest, call: _Call, outbox: Outbox, context: Context) -> None:
        """Waits for blocks, then invites the handoff, or says that none is needed.

        Does nothing if the request was aborted while it waited.
        """
        admitted = await outbox.admitted()
        if admitted is None or call.is_aborted:
            return
        if isinstance(admitted, PrefillsLocally):
            num_cached = admitted.num_cached
            self.local_prefills.count(Cause.SHORT_PROMPT, request.request_id, len(request.prompt), num_cached)
            local = decode_pb2.LocalPrefill(num_cached_tokens=num_cached)
            await context.write(decode_pb2.GenerateEvent(local_prefill=local))
            return
        self._intake.expect(request.request_id, outbox)
        await self._lease(request, admitted, call, context)

    async def _lease(self, request: EngineRequest, leased: BlocksLeased, call: _Call, context: Context) -> None:
        """Grants what a prefill worker needs to know, and tells it."""
        assert self._receiver is not None
        lease = self._receiver.grant(
            request.request_id,
            leased.blocks,
            num_tokens=len(request.prompt),
            num_cached=leased.num_cached,
            routing=request.routing_start is not None,
            num_top=request.sampling.prompt_logprobs,
        )
        call.lease = lease
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

    async def _stream(self, call: _Call, outbox: Outbox, context: Context, whole: EngineRequest | None) -> None:
        """Writes what comes until every choice has ended. `whole`: a request that nobody offered to hand over."""
        chunkers = [Chunker() for _ in range(call.num_choices)]
        num_open = call.num_choices
        while num_open:
            for batch in await outbox.take():
                if whole is not None and batch.tokens:
                    self._count_whole(whole, batch.num_cached)
                    whole = None
                for chunk in chunkers[batch.choice].cut(batch):
                    await context.write(decode_pb2.GenerateEvent(chunk=chunk))
                num_open -= batch.finish is not None

    def _count_whole(self, request: EngineRequest, num_cached: int) -> None:
        """Its prompt has been computed here; where no handoff could be taken, that is nothing to tell."""
        if self._receiver is not None:
            self.local_prefills.count(Cause.WHOLE_REQUEST, request.request_id, len(request.prompt), num_cached)

    async def _free(self, request_id: RequestId) -> None:
        """The blocks go back to the pool only when no write of the handoff can touch them any more.

        A task of its own, because a call that is cancelled twice must not cut it short.
        """
        self._intake.forget(request_id)
        freeing = asyncio.create_task(self._revoke(self._live.pop(request_id).lease))
        self._freeing.add(freeing)
        freeing.add_done_callback(partial(self._freed, request_id))
        await asyncio.shield(freeing)

    def _freed(self, request_id: RequestId, freeing: asyncio.Task[None]) -> None:
        self._freeing.discard(freeing)
        self._core.engine.cancel(request_id)

    async def _revoke(self, lease: LeaseRef | None) -> None:
        if lease is not None and self._receiver is not None:
            await self._receiver.revoke(lease.transfer_id)
