"""The Decode gRPC service: the streamed choices of one prompt, prefilled here or handed over by a prefill worker."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat

import grpc
import structlog

from common.engine.request import BlocksLeased, EngineRequest, PrefillsLocally, RequestId, Work
from common.errors import InvalidRequestError
from common.handoff.lease import LeaseRef
from common.handoff.receiver import HandoffReceiver
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2
from common.worker.core import WorkerCore
from common.worker.lifecycle import Lifecycle
from common.worker.requests import engine_request as to_engine_request
from decode_worker.answer import Answer
from decode_worker.feed import Feeds
from decode_worker.intake import Intake
from decode_worker.local_prefills import Cause, LocalPrefills
from decode_worker.outbox import Outbox
from decode_worker.self_check.checker import SelfCheck

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]
FollowContext = grpc.aio.ServicerContext[decode_pb2.FollowRequest, decode_pb2.EventBatch]
GrantContext = grpc.aio.ServicerContext[decode_pb2.GrantRequest, decode_pb2.GrantReply]


@dataclass(slots=True)
class _Call:
    """One live request, as far as an abort must know it."""

    num_choices: int
    lease: LeaseRef | None = None
    #: Choices that were aborted.
    aborted: set[int] = field(default_factory=set)
    #: Events before the first chunk.
    num_told: int = 0

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
        self_check: SelfCheck | None = None,
    ) -> None:
        self.local_prefills = LocalPrefills()
        self._core = core
        self._receiver = receiver
        self._intake = intake
        self._lifecycle = lifecycle
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._self_check = self_check
        self._live: dict[RequestId, _Call] = {}
        self._freeing: set[asyncio.Task[None]] = set()
        self._feeds = Feeds()
        lifecycle.at_stop.append(self._feeds.end)

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
                with self._watching(engine_request, outbox):
                    self._core.engine.submit(engine_request)
                    # Aborts that came before the engine knew the request.
                    for choice in sorted(call.aborted):
                        self._core.engine.abort(request_id, choice)
                    if remote:
                        await self._admit(engine_request, call, outbox, context)
                    answer = Answer(call.num_choices, partial(self._count_whole, engine_request))
                    await self._stream(request, call, outbox, answer, context)
            finally:
                await self._free(request_id)

    def _watching(self, request: EngineRequest, outbox: Outbox) -> AbstractContextManager[None]:
        """Around all that the request is told, in case it is to be checked."""
        return nullcontext() if self._self_check is None else self._self_check.watching(request, outbox)

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
            call.num_told += 1
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
        call.num_told += 1
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

    async def _stream(
        self, request: decode_pb2.GenerateRequest, call: _Call, outbox: Outbox, answer: Answer, context: Context
    ) -> None:
        """Sends what comes until every choice has ended, by the feed that the request follows, if there is one."""
        feed = self._feeds.get(request.feed_id)
        if feed is not None:
            with feed.followed(request.tag, outbox, answer, num_sent=call.num_told) as follower:
                while (chunk := await follower.next_large()) is not None:
                    await context.write(decode_pb2.GenerateEvent(chunk=chunk))
            return
        numbers = count(call.num_told) if request.feed_id else repeat(0)
        while answer.num_open:
            for chunk in answer.cut(await outbox.take()):
                chunk.seq = next(numbers)
                await context.write(decode_pb2.GenerateEvent(chunk=chunk))

    def _count_whole(self, request: EngineRequest, num_cached: int) -> None:
        """Its prompt has been computed here, although this worker takes handoffs, because none was offered."""
        if self._receiver is not None and request.work is Work.WHOLE:
            self.local_prefills.count(Cause.WHOLE_REQUEST, request.request_id, len(request.prompt), num_cached)

    async def Follow(self, request: decode_pb2.FollowRequest, context: FollowContext) -> None:  # type: ignore[override]
        """As `Generate`, a coroutine that writes. No request of its own: draining does not wait for it, but ends it."""
        with self._feeds.opened(request.window) as feed:
            await feed.run(context.write)

    async def Grant(self, request: decode_pb2.GrantRequest, context: GrantContext) -> decode_pb2.GrantReply:
        """A feed that is gone needs none."""
        if feed := self._feeds.get(request.feed_id):
            feed.grant(request.consumed)
        return decode_pb2.GrantReply()

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
