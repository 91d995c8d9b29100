"""Serves one request in any dialect, streamed or whole."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from aiohttp import web

from common.routing.codec import numpy2base64
from common.sampling import Finish, FinishReason
from router.choice import ChoiceReader, ReadChunk, VersionSpans
from router.chunk import Chunk
from router.client import MAX_WRITE_BYTES, send_json
from router.forms import Json
from router.job import REQUEST_ID_HEADER, SESSION_HEADER, ChoiceState, Dialect, Job, Outcome, TokenCount
from router.keys import FLEET, GRAMMARS, LIVE, METRICS, MODEL, PIPELINE, PLANNER, SETTINGS, TEXT, TRACING
from router.metrics import EVENTS_PER_SAMPLE, RequestClock
from router.plan import Ask, ModelLimits, Plan
from router.request_log import told
from router.rows import Rows
from router.sse import FRAMING_BYTES, EventStream
from router.stitch import DeltaStitcher, FinalStitcher, Piece, Stitcher, Whole
from router.validate import check_model_name, request_id

#: From this size on an answer is encoded in a thread: a few milliseconds on the event loop.
THREAD_FROM_BYTES = 512 * 1024

#: From so many characters on stop strings are prepared in a thread: about a millisecond.
THREAD_FROM_STOP_CHARS = 4096

#: What usage numbers that grow and a second weight version add to an event that was measured beforehand.
ENVELOPE_SLACK_BYTES = 256

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Incoming:
    """What every dialect's request has beside what it asks for."""

    #: Beginning of ids that the router makes.
    id_prefix: str
    request_id: str | None = None
    model: str | None = None
    stream: bool = False


async def serve(
    request: web.Request, clock: RequestClock, incoming: Incoming, ask: Ask, dialect: Dialect
) -> web.StreamResponse:
    """Validates, runs and answers one request.

    Raises:
        MoerelayError: before the first byte of the answer; the middleware turns later ones into an error event.
    """
    app = request.app
    with app[TRACING].request("llm_request", request.headers, clock.age_s) as span:
        job = await _job(request, clock, incoming, ask)
        span.past("router.plan", clock.age_s)
        with (
            app[LIVE].register(job.request_id, request.headers.get(SESSION_HEADER)) as live,
            told(job.request_id, clock, span),
        ):
            answer = _Stream(request, job, dialect) if incoming.stream else _WholeAnswer(request, job, dialect)
            await app[PIPELINE].run(job.plans, answer, live, app[METRICS])
            return await answer.end()


async def _job(request: web.Request, clock: RequestClock, incoming: Incoming, ask: Ask) -> Job:
    """Everything that can be wrong with a request is found here, before any worker hears of it."""
    app = request.app
    name = request_id(request.headers.get(REQUEST_ID_HEADER), incoming.request_id, incoming.id_prefix)
    check_model_name(incoming.model, app[MODEL].name)
    limits = ModelLimits.of(app[FLEET].model())
    plan = partial(app[PLANNER].plan, await _with_grammar(app, ask), name, limits)
    plans = await asyncio.to_thread(plan) if _takes_long(ask) else plan()
    num_prompt_tokens = clock.num_prompt_tokens = sum(plan.prompt_len for plan in plans)
    tokenizer = app[TEXT].tokenizer
    clock.planned()
    return Job(name, app[MODEL].name, int(time.time()), limits, plans, clock, TokenCount(num_prompt_tokens), tokenizer)


async def _with_grammar(app: web.Application, ask: Ask) -> Ask:
    """`structured_outputs` as the grammar that workers follow."""
    wanted = ask.sampling.structured_outputs
    if wanted is None:
        return ask
    return replace(ask, grammar=await app[GRAMMARS].grammar("structured_outputs", wanted.model_dump(by_alias=True)))


def _takes_long(ask: Ask) -> bool:
    """Whether planning would hold up the event loop, because long stop strings are prepared."""
    stop = ask.sampling.stop
    return isinstance(stop, list) and sum(map(len, stop)) >= THREAD_FROM_STOP_CHARS


async def encoded(num_bytes: int, encode: Callable[[], ValueT]) -> ValueT:
    """Runs `encode`, off the event loop when about so many bytes make that worth it."""
    return encode() if num_bytes < THREAD_FROM_BYTES else await asyncio.to_thread(encode)


class _Choice:
    """One choice while it runs: what reads it, and how far it is."""

    def __init__(self, job: Job, plan: Plan, choice: int) -> None:
        self.reader = ChoiceReader(plan, job.tokenizer)
        self.state = ChoiceState(plan.choice_index(choice), choice, plan, self.reader.versions)
        #: By a stop string, so that any chunk may be its last.
        self.may_end_early = bool(plan.text.stops.texts)
        self._job = job

    def read(self, chunk: Chunk) -> ReadChunk:
        """Counts what belongs to the choice, and nothing beyond its end."""
        read = self.reader.read(chunk)
        self._job.note(self.state.plan, read.chunk)
        self._job.clock.tokens(self.state.index, len(read.chunk.tokens))
        self._job.clock.num_rows += read.chunk.num_rows
        return read

    def count(self, piece: Piece) -> None:
        """The piece is about to be told to the client."""
        self.state.num_tokens += len(piece.tokens)
        self.state.num_bytes += piece.num_bytes
        self._job.count.completion += len(piece.tokens)


class _WholeAnswer:
    """Collects every choice and answers once."""

    def __init__(self, request: web.Request, job: Job, dialect: Dialect) -> None:
        self._request = request
        self._job = job
        self._dialect = dialect
        self._choices = {
            (plan.index, choice): (_Choice(job, plan, choice), Whole(plan, job.limits.layout))
            for plan in job.plans
            for choice in range(plan.sampling.n)
        }

    async def take(self, plan: Plan, chunk: Chunk) -> bool:
        choice, whole = self._choices[plan.index, chunk.choice]
        whole.feed(choice.read(chunk))
        return choice.reader.ended

    def take_now(self, plan: Plan, chunk: Chunk) -> bool:
        choice, whole = self._choices[plan.index, chunk.choice]
        if choice.may_end_early:
            return False
        whole.feed(choice.read(chunk))
        return True

    async def end(self) -> web.StreamResponse:
        outcomes = [Outcome(choice.state, whole.piece()) for choice, whole in self._choices.values()]
        for (choice, _), outcome in zip(self._choices.values(), outcomes, strict=True):
            choice.count(outcome.piece)
        num_bytes = sum(
            outcome.piece.num_bytes + self._job.prompt_logprobs_bytes(outcome.state.plan) for outcome in outcomes
        )
        answer = await encoded(num_bytes, partial(self._dialect.whole, self._job, outcomes))
        self._job.clock.num_bytes += sum(map(len, answer))
        stall_limit_s = self._request.app[SETTINGS].client_stall_timeout_s
        return await send_json(self._request, answer, self._job.headers, stall_limit_s)


class _Stream:
    """Cuts every choice into pieces and sends each as an event.

    Errors are the middleware's: plain before the first event, an event afterwards.
    """

    def __init__(self, request: web.Request, job: Job, dialect: Dialect) -> None:
        self._job = job
        self._dialect = dialect
        self._events = EventStream(request, job.headers, request.app[SETTINGS].client_stall_timeout_s)
        #: Not sent before there is a piece, so that whatever goes wrong by then is a plain error.
        self._opening = list(dialect.opening(job))
        self._choices = {
            (plan.index, choice): (_Choice(job, plan, choice), self._stitcher(plan, choice))
            for plan in job.plans
            for choice in range(plan.sampling.n)
        }

    async def take(self, plan: Plan, chunk: Chunk) -> bool:
        if self._is_sampled:
            return await self._take_timed(plan, chunk)
        choice, stitcher = self._choices[plan.index, chunk.choice]
        for piece in stitcher.feed(choice.read(chunk)):
            while self._opening:
                await self._events.send(self._opening.pop(0))
            await self._events.send_made(partial(self._event, choice, piece))
        return choice.reader.ended

    def take_now(self, plan: Plan, chunk: Chunk) -> bool:
        choice, stitcher = self._choices[plan.index, chunk.choice]
        if not self._is_steady(choice) or not self._events.is_clear:
            return False
        sampled, began = self._is_sampled, time.perf_counter()
        pieces = stitcher.feed(choice.read(chunk))
        stitched = time.perf_counter()
        events = [self._event_now(choice, piece) for piece in pieces]
        made = time.perf_counter()
        for event in events:
            if event is not None:
                self._events.send_now(event)
        if sampled and pieces:
            self._job.clock.event_took(stitched - began, made - stitched, time.perf_counter() - made)
        return True

    def _is_steady(self, choice: _Choice) -> bool:
        """Whether any chunk but the last makes a small event: the choice has begun, and repeats no long text."""
        is_short = not self._dialect.is_cumulative or choice.state.num_bytes < MAX_WRITE_BYTES
        return is_short and choice.state.num_events > 0 and not choice.may_end_early

    @property
    def _is_sampled(self) -> bool:
        """Whether the next event is one of those that are timed."""
        return self._job.clock.num_events % EVENTS_PER_SAMPLE == 0

    async def _take_timed(self, plan: Plan, chunk: Chunk) -> bool:
        """As `take`, and tells how long each part of it took."""
        choice, stitcher = self._choices[plan.index, chunk.choice]
        began = time.perf_counter()
        pieces = list(stitcher.feed(choice.read(chunk)))
        stitched = time.perf_counter()
        encode_s = [0.0]

        async def timed_event(piece: Piece, first: bool) -> Json | None:
            begun = time.perf_counter()
            event = await self._event(choice, piece, first)
            encode_s[0] += time.perf_counter() - begun
            return event

        while self._opening and pieces:
            await self._events.send(self._opening.pop(0))
        for piece in pieces:
            await self._events.send_made(partial(timed_event, piece))
        if pieces:
            sent_s = time.perf_counter() - stitched - encode_s[0]
            self._job.clock.event_took(stitched - began, encode_s[0], sent_s)
        return choice.reader.ended

    async def end(self) -> web.StreamResponse:
        for event in self._dialect.closing(self._job):
            await self._events.send(event)
        response = await self._events.finish()
        self._job.clock.num_bytes = self._events.num_bytes
        return response

    async def _event(self, choice: _Choice, piece: Piece, first: bool) -> Json | None:
        choice.count(piece)
        encode = partial(self._dialect.event, self._job, choice.state, piece, first=first)
        return self._made(choice, await encoded(self._estimate(choice.state, piece), encode))

    def _event_now(self, choice: _Choice, piece: Piece) -> Json | None:
        """As `_event`, of one in the middle of the stream that is small."""
        choice.count(piece)
        return self._made(choice, self._dialect.event(self._job, choice.state, piece, first=False))

    def _made(self, choice: _Choice, event: Json | None) -> Json | None:
        """Counts an event that is about to be sent, if there is one."""
        if event is not None:
            choice.state.num_events += 1
            self._job.clock.num_events += 1
        self._job.clock.num_bytes = self._events.num_bytes
        return event

    def _estimate(self, state: ChoiceState, piece: Piece) -> int:
        """About what the event takes; the prompt's logprobs travel with a choice's first tokens, or its last."""
        may_show_prompt = piece.finish is not None or state.num_tokens == len(piece.tokens)
        num_bytes = state.num_bytes if self._dialect.is_cumulative else piece.num_bytes
        return num_bytes + (self._job.prompt_logprobs_bytes(state.plan) if may_show_prompt else 0)

    def _stitcher(self, plan: Plan, choice: int) -> Stitcher:
        layout = self._job.limits.layout
        if self._dialect.rows_mode == "final":
            return FinalStitcher(plan, layout)
        budget = self._dialect.max_event_bytes - FRAMING_BYTES
        first, later = (budget - self._envelope_bytes(plan, choice, first=first) for first in (True, False))
        return DeltaStitcher(plan, layout, later, first, self._dialect.token_bytes)

    def _envelope_bytes(self, plan: Plan, choice: int, *, first: bool) -> int:
        """Upper bound of what an event takes beside its tokens and rows: every optional part is there and long."""
        long = 2**32 - 1
        versions = VersionSpans([(self._job.limits.weight_version, long)])
        state = ChoiceState(
            plan.choice_index(choice), choice, plan, versions, num_tokens=long, num_events=0 if first else 1
        )
        no_rows = Rows(self._job.limits.layout, 0, ())
        piece = Piece(rows=no_rows, rows_start=long, finish=Finish(FinishReason.LENGTH, stop_string=_longest(plan)))
        event = self._dialect.event(self._job, state, piece, first=first) or ()
        return sum(map(len, event)) - len(numpy2base64(no_rows.array_TLK)) + ENVELOPE_SLACK_BYTES


def _longest(plan: Plan) -> str:
    return max(plan.text.stops.texts, key=len, default="")
