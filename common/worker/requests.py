"""From the fields that Prefill and Generate share to the engine's request."""

from collections.abc import Iterable
from typing import Protocol

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


def engine_request(message: RequestMessage, work: Work, model: types_pb2.ModelDescription) -> EngineRequest:
    """Raises UnavailableError if rows are wanted of a worker that captures none."""
    if message.routing.enabled and not model.routing_enabled:
        raise UnavailableError("routing was asked for, but this worker runs with it switched off")
    return EngineRequest(
        request_id=RequestId(message.request_id),
        prompt=tuple(message.token_ids),
        sampling=sampling_from_pb(message.sampling),
        routing_start=message.routing.start if message.routing.enabled else None,
        work=work,
    )
