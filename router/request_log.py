"""What the log and the trace say of one request: its id in every line, and how it ended."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from common.tracing import Span
from router.metrics import RequestClock

log = structlog.get_logger()


@contextmanager
def told(request_id: str, clock: RequestClock, span: Span) -> Iterator[None]:
    """Around a request that was found to be right. Every log line from now on names it, also those of its failure.

    That ends with the request's task, of which aiohttp makes one for each request of a connection.
    """
    structlog.contextvars.bind_contextvars(request_id=request_id)
    if span.trace_id:
        structlog.contextvars.bind_contextvars(trace_id=span.trace_id)
    log.debug("request_taken", prompt_tokens=clock.num_prompt_tokens)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        outcome = clock.outcome if error is None else type(error).__name__
        log.debug("request_ended", outcome=outcome, tokens=clock.num_tokens, took_s=round(clock.age_s, 6))
        _tell(span, request_id, clock)


def _tell(span: Span, request_id: str, clock: RequestClock) -> None:
    """The attributes have vLLM's names."""
    ttft_s = clock.ttft_s
    span.set(
        gen_ai__request__id=request_id,
        gen_ai__usage__prompt_tokens=clock.num_prompt_tokens,
        gen_ai__usage__completion_tokens=clock.num_tokens,
        gen_ai__latency__e2e=clock.age_s,
    )
    if ttft_s is not None:
        span.set(gen_ai__latency__time_to_first_token=ttft_s)
        span.past("router.stream", clock.age_s - ttft_s, rows=clock.num_rows, bytes=clock.num_bytes)
