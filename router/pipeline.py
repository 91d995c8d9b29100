"""One choice through its workers: decode grants a lease, prefill fills it, decode streams. All dialects run on this."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import structlog

from common.errors import InternalError, MoerelayError, UnavailableError, WorkerLostError
from common.messages import sampling_to_pb
from common.pb import decode_pb2, prefill_pb2, types_pb2, worker_pb2
from router.calls import task_group, worker_errors
from router.chunk import ABORTED, Chunk, chunk_from_pb
from router.fleet import Fleet, Pair
from router.live import LiveChoice, LiveRequest
from router.validate import ChoicePlan
from router.worker import Failure, Worker

#: Receives the chunks of one choice in order; the pipeline waits for it, so a slow client slows its decode call down.
Sink = Callable[[Chunk], Awaitable[None]]

#: Decode ends its call right after the finish reason, and has acknowledged the handoff long before. A call that does
#: not return by then has nothing left to tell and must not hold the client's stream open.
CLOSING_GRACE_S = 0.5

#: An abort may overtake the request it is for by the time a worker needs to take the request in.
ABORT_ATTEMPTS = 10
ABORT_RETRY_S = 0.1

GenerateCall = grpc.aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]

log = structlog.get_logger()


class Pipeline:
    """Runs choices on the fleet. Whoever cancels a run (a client that left) cancels both calls."""

    def __init__(self, fleet: Fleet, *, connect_timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = connect_timeout_s

    async def run(self, choices: Sequence[tuple[ChoicePlan, Sink]], live: LiveRequest) -> None:
        """Runs all choices of a request at the same time; the first that fails ends the others.

        Raises:
            MoerelayError: whatever a worker or the fleet reports.
        """
        async with task_group() as group:
            for plan, sink in choices:
                group.create_task(self._run_choice(plan, live, sink))

    async def abort(self, live: LiveRequest) -> None:
        """Tells the workers to end a request with finish reason "abort"; choices not yet opened end at once."""
        live.aborted = True
        async with task_group() as group:
            for choice in live.choices.values():
                group.create_task(self._abort_choice(choice, live))

    async def _run_choice(self, plan: ChoicePlan, live: LiveRequest, sink: Sink) -> None:
        pair = self._fleet.pick()
        await self._connect(pair.decode)
        if pair.prefill:
            await self._connect(pair.prefill)
        if live.aborted:
            await sink(ABORTED)
            return
        failure: Failure = asyncio.get_running_loop().create_future()
        with live.serving(LiveChoice(plan.request_id, pair, failure)), pair.serving(failure):
            await _ChoiceRun(plan, live, pair, sink).run(failure)

    async def _connect(self, worker: Worker) -> None:
        """A worker that does not even accept a connection is left alone before anything is sent to it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await worker.channel.channel_ready()
        except TimeoutError:
            worker.suspect()
            raise UnavailableError(f"worker {worker.id} accepts no connection") from None

    async def _abort_choice(self, choice: LiveChoice, live: LiveRequest) -> None:
        """Decode first: it then drops the handoff itself, instead of reporting a broken one."""
        for attempt in range(ABORT_ATTEMPTS):
            if attempt:
                await asyncio.sleep(ABORT_RETRY_S)
            if await self._tell(choice.pair.decode, choice) or choice.request_id not in live.choices:
                break
        if choice.pair.prefill:
            await self._tell(choice.pair.prefill, choice)

    async def _tell(self, worker: Worker, choice: LiveChoice) -> bool:
        """Whether the worker knew the choice."""
        with worker_errors(worker.id):
            request = worker_pb2.AbortRequest(request_id=choice.request_id)
            reply = await worker.control.Abort(request, timeout=self._timeout_s)
        return reply.found


class _ChoiceRun:
    """The calls of one choice. Rows and tokens come from decode only; prefill's call tells whether it worked."""

    def __init__(self, plan: ChoicePlan, live: LiveRequest, pair: Pair, sink: Sink) -> None:
        self._plan = plan
        self._live = live
        self._pair = pair
        self._sink = sink
        self._finished = False
        self._prefill: asyncio.Task[None] | None = None

    async def run(self, failure: Failure) -> None:
        """Relays the decode stream to its end. Raises as soon as either call, or `failure`, does."""
        async with task_group() as group:
            watcher = group.create_task(self._watch(failure))
            call = self._pair.decode.decode.Generate(self._decode_request())
            try:
                while not self._finished:
                    await self._take(await self._next_event(call), group)
                await self._close(call)
            finally:
                call.cancel()
                watcher.cancel()

    async def _watch(self, failure: Failure) -> None:
        """Raises what the fleet or the drain has to say, unless the choice is finished."""
        try:
            await failure
        except MoerelayError:
            if not self._finished:
                raise

    async def _next_event(self, call: GenerateCall) -> decode_pb2.GenerateEvent:
        worker = self._pair.decode
        try:
            with worker_errors(worker.id):
                event = await call.read()
        except WorkerLostError:
            worker.suspect()
            raise
        if not isinstance(event, decode_pb2.GenerateEvent):
            raise WorkerLostError(f"worker {worker.id} ended the stream without a finish reason")
        return event

    async def _take(self, event: decode_pb2.GenerateEvent, group: asyncio.TaskGroup) -> None:
        if event.HasField("lease"):
            if self._prefill or not self._pair.prefill:
                raise InternalError(f"worker {self._pair.decode.id} sent a lease that nobody asked for")
            self._prefill = group.create_task(self._run_prefill(self._pair.prefill, event.lease))
            return
        chunk = chunk_from_pb(event.chunk)
        # Before the sink: what goes wrong while the client takes the last event changes nothing any more.
        self._finished = chunk.finish is not None
        await self._sink(chunk)

    async def _run_prefill(self, worker: Worker, lease: prefill_pb2.Lease) -> None:
        try:
            with worker_errors(worker.id):
                await worker.prefill.Prefill(self._prefill_request(lease))
        except MoerelayError as error:
            if isinstance(error, WorkerLostError):
                worker.suspect()
            if not (self._finished or self._live.aborted):
                raise
            log.info("prefill_failed_late", request_id=self._plan.request_id, error=error.message)

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
        )

    def _prefill_request(self, lease: prefill_pb2.Lease) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=self._plan.request_id,
            token_ids=self._plan.token_ids,
            sampling=sampling_to_pb(self._plan.sampling),
            routing=self._routing(),
            lease=lease,
        )

    def _routing(self) -> types_pb2.RoutingParams:
        start = self._plan.routing_start
        return types_pb2.RoutingParams(enabled=start is not None, start=start or 0)
