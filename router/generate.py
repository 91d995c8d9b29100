"""POST /inference/v1/generate and /inference/v1/abort_requests: the vLLM dialect, a thin layer over the pipeline."""

from dataclasses import dataclass
from functools import partial

from aiohttp import web

from common.config import RouterSettings
from common.errors import NotFoundError
from common.sampling import FinishReason
from router.answer import TokenCount, encoded, envelope_bytes, stream_choice, stream_event, whole_answer
from router.calls import task_group
from router.chunk import Chunk
from router.client import send_json
from router.json_body import read_body
from router.keys import FLEET, LIVE, METRICS, MODEL, PIPELINE, PLANNER, SETTINGS, UNKNOWN_FIELDS
from router.live import LiveRequest
from router.metrics import RequestClock
from router.request_schemas import AbortRequestsRequest, GenerateRequest, StreamOptions
from router.response_schemas import (
    AbortRequestsResponse,
)
from router.sse import FRAMING_BYTES, EventStream
from router.stitch import DeltaStitcher, FinalStitcher, Piece, Stitcher, Whole
from router.validate import ChoicePlan, ModelLimits, check_model_name, request_id

REQUEST_ID_HEADER = "X-Request-Id"


@dataclass(slots=True)
class Job:
    """One validated request and what all of its choices share."""

    request_id: str
    model: str
    body: GenerateRequest
    limits: ModelLimits
    plans: list[ChoicePlan]
    clock: RequestClock
    count: TokenCount

    @property
    def headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.request_id}

    def note(self, plan: ChoicePlan, chunk: Chunk) -> None:
        """Keeps the clock, the cache hit and the outcome up to date."""
        self.clock.tokens(plan.index, len(chunk.tokens))
        if plan.index == 0 and chunk.num_cached_tokens:
            self.count.cached = chunk.num_cached_tokens
        if chunk.finish and chunk.finish.reason is FinishReason.ABORT:
            self.clock.outcome = "aborted"


async def generate(request: web.Request) -> web.StreamResponse:
    """Tokens in, tokens (and their experts) out, streamed or whole."""
    app = request.app
    with app[METRICS].request("generate") as clock:
        body = await read_body(request, GenerateRequest, app[UNKNOWN_FIELDS])
        job = _job(request, body, clock)
        with app[LIVE].register(job.request_id) as live:
            return await (_stream if body.stream else _whole)(request, job, live)


async def abort_requests(request: web.Request) -> web.Response:
    """Ends live requests with finish reason "abort". Raises NotFoundError if none of the ids is live."""
    body = await read_body(request, AbortRequestsRequest, request.app[UNKNOWN_FIELDS])
    names = list(dict.fromkeys(body.request_ids))
    live = {name: found for name in names if (found := request.app[LIVE].get(name))}
    unknown = [name for name in names if name not in live]
    if not live:
        raise NotFoundError(f"no live request has the id {', '.join(unknown)[:512]}", param="request_ids")
    async with task_group() as group:
        for found in live.values():
            group.create_task(request.app[PIPELINE].abort(found))
    answer = AbortRequestsResponse(aborted=list(live), unknown=unknown)
    return web.Response(body=answer.model_dump_json().encode(), content_type="application/json")


def _job(request: web.Request, body: GenerateRequest, clock: RequestClock) -> Job:
    """Everything that can be wrong with a request is found here, before any worker hears of it."""
    app = request.app
    name = request_id(request.headers.get(REQUEST_ID_HEADER), body.request_id)
    check_model_name(body.model, app[MODEL].name)
    limits = ModelLimits.of(app[FLEET].model())
    plans = app[PLANNER].plan(body, name, limits)
    clock.num_prompt_tokens = len(body.token_ids)
    return Job(name, app[MODEL].name, body, limits, plans, clock, TokenCount(len(body.token_ids)))


async def _whole(request: web.Request, job: Job, live: LiveRequest) -> web.StreamResponse:
    collectors = [_Collector(job, plan) for plan in job.plans]
    await request.app[PIPELINE].run([(each.plan, each.take) for each in collectors], live)
    choices = [each.whole.piece() for each in collectors]
    prompt = job.body.token_ids if job.body.return_token_ids else None
    answer = await encoded(
        sum(choice.num_bytes for choice in choices),
        partial(whole_answer, job.request_id, job.model, job.count, job.limits.weight_version, choices, prompt),
    )
    return await send_json(request, answer, job.headers, request.app[SETTINGS].client_stall_timeout_s)


async def _stream(request: web.Request, job: Job, live: LiveRequest) -> web.StreamResponse:
    """Errors are the middleware's: plain before the first event, an event afterwards."""
    settings = request.app[SETTINGS]
    events = EventStream(request, job.headers, settings.client_stall_timeout_s)
    options = job.body.stream_options or StreamOptions()
    writers = [_Writer(job, plan, events, options, settings) for plan in job.plans]
    await request.app[PIPELINE].run([(each.plan, each.take) for each in writers], live)
    if options.include_usage:
        await events.send(stream_event(job.request_id, [], usage=job.count.usage()))
    return await events.finish()


class _Collector:
    """Sink of one choice of a whole answer."""

    def __init__(self, job: Job, plan: ChoicePlan) -> None:
        self.plan = plan
        self.whole = Whole(plan, job.limits.layout)
        self._job = job

    async def take(self, chunk: Chunk) -> None:
        self._job.note(self.plan, chunk)
        self._job.count.completion += len(chunk.tokens)
        self.whole.feed(chunk)


class _Writer:
    """Sink of one choice of a stream: cuts chunks into pieces and sends each as an event."""

    def __init__(
        self, job: Job, plan: ChoicePlan, events: EventStream, options: StreamOptions, settings: RouterSettings
    ) -> None:
        self.plan = plan
        self._job = job
        self._events = events
        self._continuous_usage = bool(options.continuous_usage_stats)
        self._stitcher = _stitcher(job, plan, options, settings)
        self._num_tokens = 0

    async def take(self, chunk: Chunk) -> None:
        self._job.note(self.plan, chunk)
        for piece in self._stitcher.feed(chunk):
            await self._events.send_made(partial(self._event, piece))

    async def _event(self, piece: Piece, first: bool) -> bytes:
        job = self._job
        self._num_tokens += len(piece.tokens)
        job.count.completion += len(piece.tokens)
        usage = job.count.usage() if self._continuous_usage else None
        prompt = job.body.token_ids if first and job.body.return_token_ids else None

        def encode() -> bytes:
            choice = stream_choice(self.plan.index, piece, self._num_tokens, job.limits.weight_version)
            return stream_event(job.request_id, [choice], usage, prompt)

        return await encoded(piece.num_bytes, encode)


def _stitcher(job: Job, plan: ChoicePlan, options: StreamOptions, settings: RouterSettings) -> Stitcher:
    if (options.routed_experts or settings.stream_routed_experts) == "final":
        return FinalStitcher(plan, job.limits.layout)
    limit = options.max_event_bytes or settings.max_event_bytes
    budget = limit - FRAMING_BYTES - envelope_bytes(job.request_id, job.limits.weight_version)
    prompt_bytes = len(stream_event("", [], None, job.body.token_ids)) if job.body.return_token_ids else 0
    return DeltaStitcher(plan, job.limits.layout, budget, budget - prompt_bytes)
