"""The router's own metrics. Names and buckets of the latencies are those that vLLM's users know."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from common.errors import InternalError, MoerelayError
from common.histogram import ITL_BUCKETS, REQUEST_BUCKETS, TTFT_BUCKETS
from common.pb import prefill_pb2
from router.errors import status_of
from router.fleet import Fleet
from router.latency import LatencyHistogram
from router.worker_state import State

#: Outcome of a request whose choices all ended by themselves.
FINISHED = "finished"


class RouterMetrics:
    """One registry per application, so that several routers can live in one process (tests do that)."""

    def __init__(self, in_flight: Callable[[], int], fleet: Fleet) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of birth beside each counter helps nobody
        self.registry = registry = CollectorRegistry()
        self._fleet = fleet
        gauge = Gauge("moerelay_router_in_flight", "Live requests of this router.", registry=registry)
        gauge.set_function(in_flight)
        self._requests = Counter(
            "moerelay_router_requests", "Requests by how they ended.", ["endpoint", "outcome"], registry=registry
        )
        self._errors = Counter("moerelay_router_errors", "Failed requests by error type.", ["type"], registry=registry)
        self._prompt_tokens = Counter("moerelay_prompt_tokens", "Prompt tokens of requests.", registry=registry)
        self._generation_tokens = Counter("moerelay_generation_tokens", "Tokens sent to clients.", registry=registry)
        self._ttft = _histogram("time_to_first_token", "Arrival to first token.", TTFT_BUCKETS, registry)
        self._itl = _histogram("inter_token_latency", "Time between tokens of a choice.", ITL_BUCKETS, registry)
        self._e2e = _histogram("e2e_request_latency", "Arrival to the end of finished answers.", REQUEST_BUCKETS, registry)
        self._prefill = _histogram("prefill", "Waiting for and computing a prompt.", TTFT_BUCKETS, registry)
        self._handoff_tail = _histogram("handoff_tail", "First token to handoff acknowledged.", TTFT_BUCKETS, registry)
        Counter(
            "moerelay_failovers",
            "Choices moved to another worker; always 0, because a lost worker ends its requests in an error.",
            registry=registry,
        )
        self._fallbacks = Counter(
            "moerelay_aggregated_fallbacks",
            "Prompts sent to a decode worker as a whole, because no prefill worker was healthy.",
            registry=registry,
        )
        labels = ["worker", "role"]
        self._up = Gauge("moerelay_worker_up", "1 if the worker is healthy.", labels, registry=registry)
        self._refused = Gauge("moerelay_worker_refused", "1 if the worker does not fit.", labels, registry=registry)

    def refresh(self) -> None:
        """Takes over what the fleet knows; called before every exposition."""
        self._up.clear()
        self._refused.clear()
        for worker in self._fleet.workers:
            self._up.labels(worker.id, worker.side).set(worker.state is State.HEALTHY)
            self._refused.labels(worker.id, worker.side).set(worker.refused is not None)

    def prefilled(self, reply: prefill_pb2.PrefillReply) -> None:
        """A prefill worker has handed a prompt over."""
        self._prefill.observe(reply.compute_s)
        self._handoff_tail.observe(reply.handoff_tail_s)

    def fell_back(self) -> None:
        """A prompt goes to a decode worker as a whole, because no prefill worker is healthy."""
        self._fallbacks.inc()

    @contextmanager
    def request(self, endpoint: str) -> Iterator["RequestClock"]:
        """Around one request: counts how it ended and how long it took."""
        clock = RequestClock(self._ttft, self._itl)
        outcome = "error"
        try:
            yield clock
            outcome = clock.outcome
        except MoerelayError as error:
            self._errors.labels(status_of(error)[1]).inc()
            raise
        except (ConnectionResetError, asyncio.CancelledError):
            outcome = "client_left"
            raise
        except BaseException:
            self._errors.labels(status_of(InternalError(""))[1]).inc()
            raise
        finally:
            self._requests.labels(endpoint, outcome).inc()
            if outcome == FINISHED:
                self._e2e.observe(time.monotonic() - clock.started_at)
            self._prompt_tokens.inc(clock.num_prompt_tokens)
            self._generation_tokens.inc(clock.num_tokens)


class RequestClock:
    """Times the tokens of one request; choices are told apart by their index."""

    def __init__(self, ttft: LatencyHistogram, itl: LatencyHistogram) -> None:
        self._ttft = ttft
        self._itl = itl
        self._last_at: dict[int, float] = {}
        self.started_at = time.monotonic()
        self.outcome = FINISHED
        self.num_prompt_tokens = 0
        self.num_tokens = 0

    def tokens(self, choice: int, num_tokens: int) -> None:
        """Some tokens of a choice have arrived together.

        Each counts as a share of the time since the choice's tokens before. Those that arrive together with the first
        one have no time between tokens and are not observed.
        """
        if not num_tokens:
            return
        now = time.monotonic()
        last = self._last_at.get(choice)
        if last is None:
            self._ttft.observe(now - self.started_at)
        else:
            self._itl.observe((now - last) / num_tokens, num_tokens)
        self._last_at[choice] = now
        self.num_tokens += num_tokens


def _histogram(
    name: str, documentation: str, buckets: tuple[float, ...], registry: CollectorRegistry
) -> LatencyHistogram:
    return LatencyHistogram(f"moerelay_{name}_seconds", documentation, buckets, registry)
