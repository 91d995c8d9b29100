"""One prompt through its workers: decode grants a lease, prefill fills it, decode streams. All dialects run on this."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import structlog

from common.errors import HandoffError, InternalError, MoerelayError, UnavailableError, WorkerLostError
from common.messages import sampling_to_pb
from common.pb import decode_pb2, prefill_pb2, types_pb2, worker_pb2
from router.calls import task_group, worker_errors
from router.chunk import Chunk, aborted, chunk_from_pb
from router.failure import Failure
from router.fleet import Fleet, Pair
from router.live import LivePrompt, LiveRequest
from router.plan import Plan
from router.worker import Worker

#: Receives the chunks of a prompt's choices, those of one choice in order; the pipeline waits for it, so a slow client
#: slows its decode call down. True: the choice has ended, by the chunk's finish reason or by what the text says.
Sink = Callable[[Plan, Chunk], Awaitable[bool]]

#: Is told what each prefill took.
PrefillObserver = Callable[[Plan, prefill_pb2.PrefillReply], None]

#: Decode ends its call right after the finish reason, and has acknowledged the handoff long before. A call that does
#: not return by then has nothing left to tell and must not hold the client's stream open.
CLOSING_GRACE_S = 0.5

#: When one worker reports a broken handoff, the other one usually knows why, and its answer is under way already.
CAUSE_WAIT_S = 0.5

#: An abort may overtake the request it is for by the time a worker needs to take the request in.
ABORT_RETRY_S = 0.1

GenerateCall = grpc.aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]

log = structlog.get_logger()


class Pipeline:
    """Runs prompts on the fleet. Whoever cancels a run (a client that left) cancels both calls."""

    def __init__(self, fleet: Fleet, *, connect_timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = connect_timeout_s

    async def run(self, plans: Sequence[Plan], sink: Sink, live: LiveRequest, on_prefill: PrefillObserver) -> None:
        """Runs all prompts of a request at the same time; the first that fails ends the others.

        Raises:
            MoerelayError: whatever a worker or the fleet reports.
        """
        async with task_group() as group:
            for plan in plans:
                group.create_task(self._run_prompt(plan, live, sink, on_prefill))

    async def abort(self, live: LiveRequest, choice: tuple[int, int] | None = None) -> None:
        """Tells the workers to end a request with finish reason "abort"; prompts not yet opened end at once.

        `choice`: (index of its prompt, index there) of the only one that is to end.
        """
        if choice is None:
            live.aborted = True
        else:
            live.aborted_choices.add(choice)
        async with task_group() as group:
            for prompt in live.prompts.values():
                if choice is None:
                    group.create_task(self._abort_prompt(prompt, live))
                elif prompt.index == choice[0]:
                    group.create_task(self._abort_choice(prompt, live, choice[1]))

    async def _run_prompt(self, plan: Plan, live: LiveRequest, sink: Sink, on_prefill: PrefillObserver) -> None:
        pair = self._fleet.pick()
        async with live.failure.guarding():
            await self._connect(pair.decode)
            if pair.prefill:
                await self._connect(pair.prefill)
        if live.aborted:
            for choice in range(plan.sampling.n):
                await sink(plan, aborted(choice))
            return
        prompt = LivePrompt(plan.request_id, pair, plan.index)
        async with task_group() as group:
            with live.serving(prompt):
                for index, choice in live.aborted_choices:
                    if index == plan.index:
                        group.create_task(self._abort_choice(prompt, live, choice))
                await _PromptRun(plan, live, pair, sink, on_prefill, timeout_s=self._timeout_s).run()

    async def _connect(self, worker: Worker) -> None:
        """A worker that does not even accept a connection is left alone before anything is sent to it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await worker.channel.channel_ready()
        except TimeoutError:
            worker.suspect()
            raise UnavailableError(f"worker {worker.id} accepts no connection") from None

    async def _abort_prompt(self, prompt: LivePrompt, live: LiveRequest) -> None:
        """Decode first: it then drops the handoff itself, instead of reporting a broken one."""
        message = worker_pb2.AbortRequest(request_id=prompt.request_id)
        await self._tell_decode(prompt, live, message)
        try:
            if prompt.pair.prefill:
                await _abort(prompt.pair.prefill, message, self._timeout_s)
        except MoerelayError as error:
            # It may have left long after its handoff; decode has dropped what it could still send.
            log.info("prefill_not_told", request_id=prompt.request_id, error=error.message)

    async def _abort_choice(self, prompt: LivePrompt, live: LiveRequest, choice: int) -> None:
        """The prompt's other choices go on, so that prefill need not know."""
        message = worker_pb2.AbortRequest(request_id=prompt.request_id, choice=choice)
        await self._tell_decode(prompt, live, message)

    async def _tell_decode(self, prompt: LivePrompt, live: LiveRequest, message: worker_pb2.AbortRequest) -> None:
        """Until it has heard of the request that is to end, or the request has ended anyway."""
        while not await _abort(prompt.pair.decode, message, self._timeout_s):
            if prompt.request_id not in live.prompts:
                return
            await asyncio.sleep(ABORT_RETRY_S)


async def _abort(worker: Worker, request: worker_pb2.AbortRequest, timeout_s: float) -> bool:
    with worker_errors(worker.id):
        return (await worker.control.Abort(request, timeout=timeout_s)).found


class _PromptRun:
    """The calls of one prompt. Rows and tokens come from decode only; prefill's call tells whether it worked."""

    def __init__(
        self, plan: Plan, live: LiveRequest, pair: Pair, sink: Sink, on_prefill: PrefillObserver, *, timeout_s: float
    ) -> None:
        self._plan = plan
        self._timeout_s = timeout_s
        #: Choices that have not ended.
        self._open = set(range(plan.sampling.n))
        self._live = live
        self._pair = pair
        self._sink = sink
        self._on_prefill = on_prefill
        self._prefill: asyncio.Task[None] | None = None
        #: Decode has the whole prompt, or needs it no more: nothing that happens to prefill can harm the choice.
        self._handed_over = False
        #: One of the calls has reported a broken handoff and waits for what the other has to say.
        self._broken = False

    async def run(self) -> None:
        """Relays the decode stream to its end. Raises as soon as a call fails or the request does."""
        lost = Failure()
        async with task_group() as group:
            call = self._pair.decode.decode.Generate(self._decode_request())
            try:
                with self._pair.decode.serving(lost):
                    async with lost.guarding(), self._live.failure.guarding():
                        last = await self._relay(call, group)
                if last:
                    # Outside the guards: what goes wrong while the client takes the last chunk changes nothing now.
                    await self._sink(self._plan, last)
                    await self._close(call)
                else:
                    await self._end_early(call)
            finally:
                call.cancel()

    async def _relay(self, call: GenerateCall, group: asyncio.TaskGroup) -> Chunk | None:
        """Starts prefill when decode asks for it and passes on every chunk but the last, which it returns.

        None: every choice has ended, but decode does not know that of all of them yet.
        """
        while self._open:
            event = await self._next_event(call)
            if event.HasField("lease"):
                self._start_prefill(event.lease, group)
                continue
            chunk = chunk_from_pb(event.chunk)
            self._handed_over = self._handed_over or bool(chunk.tokens or chunk.finish)
            if chunk.finish is not None and self._open == {chunk.choice}:
                return chunk
            if chunk.choice in self._open and await self._sink(self._plan, chunk):
                self._open.discard(chunk.choice)
                if chunk.finish is None and self._open:
                    group.create_task(self._drop(chunk.choice))
        return None

    async def _drop(self, choice: int) -> None:
        """Nobody wants more of this choice; the others go on."""
        try:
            await _abort(
                self._pair.decode,
                worker_pb2.AbortRequest(request_id=self._plan.request_id, choice=choice),
                self._timeout_s,
            )
        except MoerelayError as error:
            log.info("choice_not_dropped", request_id=self._plan.request_id, choice=choice, error=error.message)

    async def _end_early(self, call: GenerateCall) -> None:
        """Decode computes what nobody wants any more; prefill has handed over and only needs to say so."""
        call.cancel()
        if self._prefill:
            await asyncio.wait([self._prefill], timeout=CLOSING_GRACE_S)
            self._prefill.cancel()

    async def _next_event(self, call: GenerateCall) -> decode_pb2.GenerateEvent:
        worker = self._pair.decode
        try:
            with worker.call():
                event = await call.read()
        except HandoffError:
            if self._prefill and not self._broken:
                # An error of prefill's that is not about the handoff is the cause, and ends the group by itself.
                self._broken = True
                await asyncio.wait([self._prefill], timeout=CAUSE_WAIT_S)
            raise
        if not isinstance(event, decode_pb2.GenerateEvent):
            raise WorkerLostError(f"worker {worker.id} ended the stream without a finish reason")
        return event

    def _start_prefill(self, lease: prefill_pb2.Lease, group: asyncio.TaskGroup) -> None:
        if self._prefill or not self._pair.prefill:
            raise InternalError(f"worker {self._pair.decode.id} sent a lease that nobody asked for")
        # An abort tells decode, which then ends the choice without a prompt.
        if not self._live.aborted:
            self._prefill = group.create_task(self._run_prefill(self._pair.prefill, lease))

    async def _run_prefill(self, worker: Worker, lease: prefill_pb2.Lease) -> None:
        """Raises what makes the prompt fail; later, and after an abort, errors are only logged."""
        try:
            self._on_prefill(self._plan, await self._call_prefill(worker, lease))
        except MoerelayError as error:
            if await self._is_fatal(error):
                raise
            log.info("prefill_failed_late", request_id=self._plan.request_id, worker=worker.id, error=error.message)

    async def _call_prefill(self, worker: Worker, lease: prefill_pb2.Lease) -> prefill_pb2.PrefillReply:
        lost = Failure()
        with worker.serving(lost):
            async with lost.guarding():
                with worker.call():
                    return await worker.prefill.Prefill(self._prefill_request(lease))

    async def _is_fatal(self, error: MoerelayError) -> bool:
        """Whether prefill's error ends the prompt. Of two reports of a broken handoff, decode's counts."""
        if isinstance(error, HandoffError) and not (self._handed_over or self._live.aborted):
            if self._broken:
                return False
            self._broken = True
            await asyncio.sleep(CAUSE_WAIT_S)  # decode's error, if there is one, ends the group and this with it
        return not (self._handed_over or self._live.aborted)

    async def _close(self, call: GenerateCall) -> None:
        """Lets both calls end by themselves, so that neither worker takes the end for a client that left."""
        try:
            async with asyncio.timeout(CLOSING_GRACE_S):
                with worker_errors(self._pair.decode.id):
                    await call.read()
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
