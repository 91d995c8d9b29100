"""One prompt through its workers: decode grants a lease, prefill fills it, decode streams."""

import asyncio
import time
from dataclasses import replace

import structlog

from common.errors import HandoffError, InternalError, MoerelayError, NotTakenError, WorkerLostError
from common.messages import sampling_to_pb
from common.pb import decode_pb2, prefill_pb2, types_pb2, worker_pb2
from common.sampling import FinishReason
from common.tracing import call_metadata, current_span
from router.calls import task_group
from router.chunk import Chunk
from router.decode_stream import DecodeEvent, DecodeStream
from router.dependence import Dependence
from router.fleet import Pair
from router.live import LivePrompt, LiveRequest
from router.plan import Plan
from router.sink import Observer, Sink
from router.worker import Worker

#: Decode ends its call right after the finish reason, and has acknowledged the handoff long before. A call that does
#: not return by then has nothing left to tell and must not hold the client's stream open.
CLOSING_GRACE_S = 0.5

#: When one worker reports a broken handoff, the other one usually knows why, and its answer is under way already.
CAUSE_WAIT_S = 0.5

log = structlog.get_logger()


class PromptRun:
    """The calls of one prompt. Rows and tokens come from decode only; prefill's call tells whether it worked."""

    def __init__(
        self,
        plan: Plan,
        live: LiveRequest,
        prompt: LivePrompt,
        dependence: Dependence,
        sink: Sink,
        observer: Observer,
        *,
        timeout_s: float,
    ) -> None:
        """`dependence`: on the prompt's workers, which lasts at least as long as this."""
        self._plan = plan
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        #: Choices that have not ended.
        self._open = set(range(plan.sampling.n))
        self._live = live
        self._prompt = prompt
        self._dependence = dependence
        self._sink = sink
        self._observer = observer
        self._prefill: asyncio.Task[None] | None = None
        #: Decode has asked for the handoff, or never will.
        self._prefill_due = asyncio.Event()
        #: Decode has the whole prompt, or needs it no more: nothing that happens to prefill can harm the choice.
        self._handed_over = False
        #: One of the calls has reported a broken handoff and waits for what the other has to say.
        self._broken = False
        #: Something of the answer has been passed on, so that the prompt cannot begin anew.
        self._passed_on = False
        #: Of `_pass_on_now`.
        self._error: Exception | None = None
        #: The worker that did not take the prompt, of which nothing has been passed on; another pair may run it.
        self.refused_by: Worker | None = None

    @property
    def _pair(self) -> Pair:
        return self._prompt.pair

    async def run(self) -> None:
        """Relays the decode stream to its end. Raises as soon as a call fails or the request does."""
        decode = self._pair.decode
        async with task_group() as group:
            stream = DecodeStream(decode, self._pass_on_now)
            with stream.opened(self._decode_request(), group):
                if self._pair.prefill:
                    group.create_task(self._watch_prefill(self._pair.prefill))
                try:
                    async with self._dependence.lost(decode).guarding(), self._live.failure.guarding():
                        last = await self._relay(stream, group)
                finally:
                    self._prefill_due.set()
                self._dependence.release([decode])
                if not (last and last.finish and last.finish.reason is FinishReason.ABORT):
                    decode.breaker.succeeded()
                if last:
                    # Outside the guards: what goes wrong while the client takes the last chunk changes nothing now.
                    await self._sink.take(self._plan, last)
                    await self._close(stream)
                else:
                    await self._end_early(stream)

    async def _relay(self, stream: DecodeStream, group: asyncio.TaskGroup) -> Chunk | None:
        """Starts prefill when decode asks for it and passes on every chunk but the last, which it returns.

        None: every choice has ended, but decode does not know that of all of them yet.
        """
        while self._open:
            chunk = await self._next_event(stream)
            if self._error is not None:
                raise self._error
            if isinstance(chunk, prefill_pb2.Lease | decode_pb2.LocalPrefill):
                current_span().past("router.lease", time.monotonic() - self._began)
            if isinstance(chunk, prefill_pb2.Lease):
                self._start_prefill(chunk, group)
                continue
            if isinstance(chunk, decode_pb2.LocalPrefill):
                self._forgo_prefill()
                continue
            self._passed_on = True
            self._handed_over = self._handed_over or bool(chunk.tokens or chunk.finish)
            if chunk.finish is not None and self._open == {chunk.choice}:
                return chunk
            if chunk.choice in self._open and await self._sink.take(self._plan, chunk):
                self._open.discard(chunk.choice)
                if chunk.finish is None and self._open:
                    group.create_task(self._drop(chunk.choice))
        return None

    def _pass_on_now(self, chunk: Chunk) -> bool:
        """Passes on what comes while `_relay` waits, if there is nothing else to do about it and the client has room.

        One chunk of each of many requests comes at the same moment: to wake their tasks costs as much as the chunks.
        """
        if not self._handed_over or chunk.finish is not None or chunk.choice not in self._open:
            return False
        try:
            return self._sink.take_now(self._plan, chunk)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this prompt, and not the feed of all
            self._error = error
            return False

    async def _drop(self, choice: int) -> None:
        """Nobody wants more of this choice; the others go on."""
        try:
            message = worker_pb2.AbortRequest(request_id=self._plan.request_id, choice=choice)
            await self._pair.decode.abort(message, self._timeout_s)
        except MoerelayError as error:
            log.info("choice_not_dropped", request_id=self._plan.request_id, choice=choice, error=error.message)

    async def _end_early(self, stream: DecodeStream) -> None:
        """Decode computes what nobody wants any more; prefill has handed over and only needs to say so."""
        stream.cancel()
        if self._prefill:
            await asyncio.wait([self._prefill], timeout=CLOSING_GRACE_S)
            self._prefill.cancel()

    async def _next_event(self, stream: DecodeStream) -> DecodeEvent:
        try:
            event = await stream.next()
        except NotTakenError:
            self._refused(self._pair.decode)
            raise
        except MoerelayError as error:
            if isinstance(error, HandoffError) and self._prefill and not self._broken:
                # An error of prefill's that is not about the handoff is the cause, and ends the group by itself.
                self._broken = True
                await asyncio.wait([self._prefill], timeout=CAUSE_WAIT_S)
            self._blame(self._pair.decode, error)
            raise
        self._prompt.begun = True
        return event

    def _start_prefill(self, lease: prefill_pb2.Lease, group: asyncio.TaskGroup) -> None:
        if self._prefill or not self._pair.prefill:
            raise InternalError(f"worker {self._pair.decode.id} sent a lease that nobody asked for")
        self._prefill_due.set()
        # An abort tells decode, which then ends the choice without a prompt.
        if not self._live.aborted:
            self._prefill = group.create_task(self._run_prefill(self._pair.prefill, lease))

    def _forgo_prefill(self) -> None:
        """Decode computes the prompt itself: prefill never hears of it, neither of its start nor of an abort."""
        if self._prefill or not self._pair.prefill:
            raise InternalError(f"worker {self._pair.decode.id} did without a handoff that nobody offered")
        self._prefill_due.set()
        self._dependence.release([self._pair.prefill])
        self._prompt.pair = replace(self._pair, prefill=None)

    async def _run_prefill(self, worker: Worker, lease: prefill_pb2.Lease) -> None:
        """Raises what makes the prompt fail; later, and after an abort, errors are only logged."""
        try:
            await worker.connect(self._timeout_s)
            self._observer.prefilled(await self._call_prefill(worker, lease))
            worker.breaker.succeeded()
        except MoerelayError as error:
            if await self._is_fatal(error):
                if isinstance(error, NotTakenError):
                    self._refused(worker)
                self._blame(worker, error)
                raise
            log.info("prefill_failed_late", request_id=self._plan.request_id, worker=worker.id, error=error.message)

    async def _call_prefill(self, worker: Worker, lease: prefill_pb2.Lease) -> prefill_pb2.PrefillReply:
        try:
            async with self._dependence.lost(worker).guarding():
                with worker.call():
                    return await worker.prefill.Prefill(self._prefill_request(lease), metadata=call_metadata())
        finally:
            self._dependence.release([worker])

    async def _watch_prefill(self, worker: Worker) -> None:
        """Until decode asks for the handoff prefill has done nothing, so that another pair may run the prompt."""
        try:
            async with self._dependence.lost(worker).guarding():
                await self._prefill_due.wait()
        except WorkerLostError as error:
            if self._passed_on:  # the end of what was aborted
                return
            self.refused_by = worker
            raise NotTakenError(error.message) from None

    def _refused(self, worker: Worker) -> None:
        """The worker has done nothing for the prompt, and gets no other until its next heartbeat."""
        worker.drains()
        if not self._passed_on:
            self.refused_by = worker

    def _blame(self, worker: Worker, error: MoerelayError) -> None:
        """Counts a failure against whoever may be at fault: of a broken handoff both, because nobody knows.

        Not a worker that cannot be reached, which heartbeats tell.
        """
        if isinstance(error, WorkerLostError) and error.unreachable:
            return
        if isinstance(error, HandoffError):
            at_fault = self._pair.workers
        elif isinstance(error, InternalError | WorkerLostError):
            at_fault = [worker]
        else:
            return
        for each in at_fault:
            each.breaker.failed(time.monotonic())

    async def _is_fatal(self, error: MoerelayError) -> bool:
        """Whether prefill's error ends the prompt. Of two reports of a broken handoff, decode's counts."""
        if isinstance(error, HandoffError) and not (self._handed_over or self._live.aborted):
            if self._broken:
                return False
            self._broken = True
            await asyncio.sleep(CAUSE_WAIT_S)  # decode's error, if there is one, ends the group and this with it
        return not (self._handed_over or self._live.aborted)

    async def _close(self, stream: DecodeStream) -> None:
        """Lets both calls end by themselves, so that neither worker takes the end for a client that left."""
        try:
            async with asyncio.timeout(CLOSING_GRACE_S):
                await stream.ended()
                if self._prefill:
                    await self._prefill
        except (MoerelayError, TimeoutError) as error:
            log.warning("call_ended_badly", request_id=self._plan.request_id, error=repr(error))
        if self._prefill:
            self._prefill.cancel()

    def _decode_request(self) -> decode_pb2.GenerateRequest:
        remote = self._pair.prefill is not None
        return decode_pb2.GenerateRequest(
            request_id=self._plan.request_id,
            token_ids=self._plan.token_ids,
            sampling=sampling_to_pb(self._plan.sampling),
            routing=self._routing(),
            prefill_site=decode_pb2.PREFILL_SITE_REMOTE if remote else decode_pb2.PREFILL_SITE_LOCAL,
            priority=self._plan.priority,
            cache_salt=self._plan.cache_salt,
        )

    def _prefill_request(self, lease: prefill_pb2.Lease) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=self._plan.request_id,
            token_ids=self._plan.token_ids,
            sampling=sampling_to_pb(self._plan.sampling),
            routing=self._routing(),
            lease=lease,
            priority=self._plan.priority,
            cache_salt=self._plan.cache_salt,
        )

    def _routing(self) -> types_pb2.RoutingParams:
        start = self._plan.routing_start
        return types_pb2.RoutingParams(enabled=start is not None, start=start or 0)
