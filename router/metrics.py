"""The router's own metrics. Names and buckets of the latencies are those that vLLM's users know."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics

from common.errors import HTTP_TABLE, InternalError, MoerelayError
from common.histogram import ITL_BUCKETS, REQUEST_BUCKETS, STAGE_BUCKETS, TOKEN_BUCKETS, TTFT_BUCKETS
from common.pb import prefill_pb2
from common.sampling import FinishReason
from router.counters import CounterFamily, ProcessFamilies
from router.errors import status_of
from router.fleet import Fleet
from router.fleet_gauges import FleetGauges
from router.latency import LabelledHistograms, LatencyHistogram
from router.processes.counter_memory import CounterMemory

#: What the metrics call the routes that generate.
Endpoint = Literal["generate", "skyrl", "completions", "chat_completions", "sglang_generate"]
#: How a request ends; `finished`: its choices all ended by themselves.
Outcome = Literal["finished", "aborted", "error", "client_left"]

#: What a router spends its time on: of each request, and of one event in EVENTS_PER_SAMPLE of a stream.
REQUEST_STAGES = ("plan", "place")
EVENT_STAGES = ("stitch", "encode", "send")
EVENTS_PER_SAMPLE = 16
#: From a short event to rows of a long prompt, or a client that does not read.
_ROUTER_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, *STAGE_BUCKETS)


class RequestHistograms:
    """What is observed of each request and its choices."""

    def __init__(self, memory: CounterMemory, registry: CollectorRegistry) -> None:
        def seconds(name: str, documentation: str, buckets: tuple[float, ...]) -> LatencyHistogram:
            return LatencyHistogram(f"moerelay_{name}_seconds", documentation, buckets, memory, registry)

        def tokens(name: str, documentation: str) -> LatencyHistogram:
            return LatencyHistogram(f"moerelay_{name}", documentation, TOKEN_BUCKETS, memory, registry)

        self.ttft = seconds("time_to_first_token", "Arrival to first token.", TTFT_BUCKETS)
        self.itl = seconds("inter_token_latency", "Time between tokens of a choice.", ITL_BUCKETS)
        self.tpot = seconds("request_time_per_output_token", "Mean time between a choice's tokens.", ITL_BUCKETS)
        self.e2e = seconds("e2e_request_latency", "Arrival to the end of finished answers.", REQUEST_BUCKETS)
        self.prefill = seconds("prefill", "Waiting for and computing a prompt.", TTFT_BUCKETS)
        self.handoff_tail = seconds("handoff_tail", "First token to handoff acknowledged.", TTFT_BUCKETS)
        self.prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = tokens("request_generation_tokens", "Tokens of each choice of finished requests.")
        stages = ("stage", (*REQUEST_STAGES, *EVENT_STAGES))
        name, documentation = "moerelay_router_stage_seconds", "What the router spends its time on."
        self.stages = LabelledHistograms(name, documentation, _ROUTER_BUCKETS, stages, memory, registry)


class RouterMetrics:
    """One registry per application, so that several routers can live in one process (tests do that)."""

    def __init__(
        self,
        in_flight: Callable[[], int],
        fleet: Fleet,
        memory: CounterMemory,
        certificates: Mapping[str, Callable[[], float]] = MappingProxyType({}),
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of birth beside each counter helps nobody
        self.registry = registry = CollectorRegistry()
        self._now = now
        ProcessFamilies(memory, registry)
        gauge = Gauge("moerelay_router_in_flight", "Live requests of this router.", registry=registry)
        gauge.set_function(in_flight)
        Gauge("moerelay_router_processes", "Processes of this router.", registry=registry).set(1)

        if certificates:
            name, documentation = "moerelay_certificate_seconds_left", "Until the certificate ends."
            left = Gauge(name, documentation, ["certificate"], registry=registry)
            for certificate, seconds_left in certificates.items():
                left.labels(certificate).set_function(seconds_left)

        def counter(name: str, documentation: str, **labels: Iterable[str]) -> CounterFamily:
            return CounterFamily(f"moerelay_{name}", documentation, memory, registry, **labels)

        self._requests = counter(
            "router_requests", "Requests by how they ended.", endpoint=get_args(Endpoint), outcome=get_args(Outcome)
        )
        self._successes = counter(
            "request_success", "Choices that ended by themselves or by abort.", finished_reason=FinishReason
        )
        types = dict.fromkeys(kind for _, kind in HTTP_TABLE.values())
        self._errors = counter("router_errors", "Failed requests by error type.", type=types)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests.")
        self._generation_tokens = counter("generation_tokens", "Tokens sent to clients.")
        self._rows = counter("routing_rows_sent", "Routing rows sent to clients.")
        self._bytes = counter("router_sent_bytes", "Bytes of answers to requests, sent to clients.")
        self._events = counter("router_events", "Events of streams sent to clients.")
        self._seen = RequestHistograms(memory, registry)
        counter(
            "failovers",
            "Choices moved to another worker; always 0, because a lost worker ends its requests in an error.",
        )
        self._fallbacks = counter(
            "aggregated_fallbacks", "Prompts sent to a decode worker as a whole, because no prefill worker was healthy."
        )
        self._fleet = FleetGauges(fleet, registry)

    def refresh(self) -> None:
        """Takes over what the fleet knows; called before every exposition."""
        self._fleet.refresh()

    def placed(self, took_s: float) -> None:
        """Workers for a prompt were found and can be reached."""
        self._seen.stages["place"].observe(took_s)

    def prefilled(self, reply: prefill_pb2.PrefillReply) -> None:
        """A prefill worker has handed a prompt over."""
        self._seen.prefill.observe(reply.compute_s)
        self._seen.handoff_tail.observe(reply.handoff_tail_s)

    def fell_back(self) -> None:
        """A prompt goes to a decode worker as a whole, because no prefill worker is healthy."""
        self._fallbacks.inc()

    @contextmanager
    def request(self, endpoint: Endpoint) -> Iterator["RequestClock"]:
        """Around one request: counts how it ended and how long it took."""
        clock = RequestClock(self._seen, self._now)
        outcome: Outcome = "error"
        try:
            yield clock
            outcome = clock.outcome
        except MoerelayError as error:
            self._errors.inc(status_of(error)[1])
            raise
        except (ConnectionResetError, asyncio.CancelledError):
            outcome = "client_left"
            raise
        except BaseException:
            self._errors.inc(status_of(InternalError(""))[1])
            raise
        finally:
            self._requests.inc(endpoint, outcome)
            self._count(clock)
            if outcome == "finished":
                clock.observe_whole()

    def _count(self, clock: "RequestClock") -> None:
        self._prompt_tokens.inc(by=clock.num_prompt_tokens)
        self._generation_tokens.inc(by=clock.num_tokens)
        self._rows.inc(by=clock.num_rows)
        self._bytes.inc(by=clock.num_bytes)
        self._events.inc(by=clock.num_events)
        for reason in clock.finish_reasons:
            self._successes.inc(reason.value)


class _ChoiceTimes:
    """When a choice's first and latest tokens came."""

    __slots__ = ("first_at", "last_at", "num_tokens")

    def __init__(self, now: float, num_tokens: int) -> None:
        self.first_at = self.last_at = now
        self.num_tokens = num_tokens


class RequestClock:
    """Times the tokens of one request, and adds up what it gets; choices are told apart by their index."""

    def __init__(self, seen: RequestHistograms, now: Callable[[], float]) -> None:
        self._seen = seen
        self._now = now
        self._choices: dict[int, _ChoiceTimes] = {}
        self.started_at = self._now()
        self.outcome: Outcome = "finished"
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.num_rows = 0
        self.num_bytes = 0
        self.num_events = 0
        #: Of the choices that have ended.
        self.finish_reasons: list[FinishReason] = []

    @property
    def age_s(self) -> float:
        """Seconds since the request came."""
        return self._now() - self.started_at

    @property
    def ttft_s(self) -> float | None:
        """From the request to the first token of any of its choices; None before."""
        return min((times.first_at - self.started_at for times in self._choices.values()), default=None)

    def planned(self) -> None:
        """The request was read, and everything about it is known and right."""
        self._seen.stages["plan"].observe(self.age_s)

    def tokens(self, choice: int, num_tokens: int) -> None:
        """Some tokens of a choice have arrived together.

        Each counts as a share of the time since the choice's tokens before. Those that arrive together with the first
        one have no time between tokens and are not observed.
        """
        if not num_tokens:
            return
        now = self._now()
        times = self._choices.get(choice)
        if times is None:
            self._choices[choice] = _ChoiceTimes(now, num_tokens)
            self._seen.ttft.observe(now - self.started_at)
        else:
            self._seen.itl.observe((now - times.last_at) / num_tokens, num_tokens)
            times.last_at = now
            times.num_tokens += num_tokens
        self.num_tokens += num_tokens

    def finished(self, reason: FinishReason) -> None:
        """A choice has ended."""
        self.finish_reasons.append(reason)
        if reason is FinishReason.ABORT:
            self.outcome = "aborted"

    def event_took(self, stitch_s: float, encode_s: float, send_s: float) -> None:
        """What one event took; told of one in EVENTS_PER_SAMPLE."""
        for stage, seconds in zip(EVENT_STAGES, (stitch_s, encode_s, send_s), strict=True):
            self._seen.stages[stage].observe(seconds)

    def observe_whole(self) -> None:
        """All choices have ended by themselves, and the client has its answer."""
        self._seen.e2e.observe(self.age_s)
        self._seen.prompt_tokens.observe(self.num_prompt_tokens)
        for times in self._choices.values():
            self._seen.generation_tokens.observe(times.num_tokens)
            if times.num_tokens > 1:
                self._seen.tpot.observe((times.last_at - times.first_at) / (times.num_tokens - 1))
