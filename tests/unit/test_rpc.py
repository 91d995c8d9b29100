"""An RPC that fails ends, with the error that its handler raised, whatever that says."""

from typing import Any

import grpc
import pytest

from common.errors import CheckpointError, InvalidRequestError, WorkerLostError
from common.pb import worker_pb2, worker_pb2_grpc
from common.rpc import ErrorInterceptor, grpc_errors


def _refuser(words: str) -> grpc.GenericRpcHandler:
    """A worker that refuses every path as a broken checkpoint, in these words."""

    async def stage_weights(request: Any, context: Any) -> worker_pb2.StageWeightsReply:
        try:
            raise CheckpointError(words)
        except CheckpointError as error:
            raise InvalidRequestError(str(error), param="path\udc80é") from error

    handler = grpc.unary_unary_rpc_method_handler(
        stage_weights, worker_pb2.StageWeightsRequest.FromString, worker_pb2.StageWeightsReply.SerializeToString
    )
    return grpc.method_handlers_generic_handler("moerelay.v1.Worker", {"StageWeights": handler})


async def _complaint(words: str) -> InvalidRequestError:
    """What a client gets to see of these words."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers((_refuser(words),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            with pytest.raises(InvalidRequestError) as caught, grpc_errors():
                await stub.StageWeights(worker_pb2.StageWeightsRequest(path="/m"), timeout=60)
            return caught.value
    finally:
        await server.stop(None)


async def test_a_lone_surrogate_in_a_message_does_not_hang_the_call() -> None:
    error = await _complaint("/m/\ud800 is missing — é")
    assert (error.message, error.param) == (r"/m/\ud800 is missing — é", r"path\udc80\xe9")


@pytest.mark.parametrize("character", ["x", "é", "\U0001f600"])
async def test_a_message_too_long_for_grpc_is_cut(character: str) -> None:
    error = await _complaint(character * 40_000)
    assert error.message == character * (2400 // len(character.encode())) + "…"


async def test_a_call_on_a_closed_channel_says_that_the_worker_is_gone() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    stub: Any = worker_pb2_grpc.WorkerStub(channel)
    await channel.close()
    with pytest.raises(WorkerLostError) as caught, grpc_errors():
        await stub.Abort(worker_pb2.AbortRequest(request_id="r"))
    assert caught.value.unreachable
