"""From the fields that Prefill and Generate share to the engine's request."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from common.engine.grammar import GrammarCompiler
from common.engine.request import EngineRequest, RequestId, Work
from common.errors import UnavailableError
from common.messages import sampling_from_pb
from common.pb import types_pb2


class RequestMessage(Protocol):
    """What PrefillRequest and GenerateRequest have in common."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Iterable[int]: ...
    @property
    def sampling(self) -> types_pb2.SamplingParams: ...
    @property
    def routing(self) -> types_pb2.RoutingParams: ...
    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


async def engine_request(
    message: RequestMessage,
    work: Work,
    model: types_pb2.ModelDescription,
    grammars: GrammarCompiler,
    *,
    local_prefill_max_tokens: int = 0,
) -> EngineRequest:
    """Compiles the grammar in a thread: a large one takes longer than an event loop may stand still.

    Raises:
        InvalidRequestError: the grammar is wrong, or this worker's checkpoint cannot serve one.
        UnavailableError: rows are wanted of a worker that captures none.
    """
    if message.routing.enabled and not model.routing_enabled:
        raise UnavailableError("routing was asked for, but this worker runs with it switched off")
    sampling = sampling_from_pb(message.sampling)
    matcher = None
    if sampling.grammar is not None:
        matcher = await asyncio.to_thread(grammars.compile, sampling.grammar)
    return EngineRequest(
        request_id=RequestId(message.request_id),
        prompt=tuple(message.token_ids),
        sampling=sampling,
        routing_start=message.routing.start if message.routing.enabled else None,
        work=work,
        priority=message.priority,
        matcher=matcher,
        cache_salt=message.cache_salt,
        local_prefill_max_tokens=local_prefill_max_tokens,
    )
