"""The exception tree has complete HTTP and gRPC tables, and an error keeps its class across the wire."""

import grpc
import pytest

from common import errors
from common.errors import HTTP_TABLE, MoerelayError, StartupError
from common.rpc import ERROR_TRAILER, GRPC_TABLE, PARAM_TRAILER, RETRY_AFTER_TRAILER, from_grpc


def subclasses(cls: type[MoerelayError]) -> set[type[MoerelayError]]:
    found = set(cls.__subclasses__())
    return found | {deeper for direct in found for deeper in subclasses(direct)}


REACHES_CLIENTS = subclasses(errors.RequestError) | subclasses(errors.ServiceError)


def test_tables_are_complete() -> None:
    assert set(HTTP_TABLE) == set(GRPC_TABLE) == REACHES_CLIENTS
    assert not subclasses(StartupError) & set(HTTP_TABLE)


def test_statuses_are_errors_and_trailers_are_unique() -> None:
    assert all(400 <= status < 600 for status, _ in HTTP_TABLE.values())
    assert len({kind for _, kind in GRPC_TABLE.values()}) == len(GRPC_TABLE)


@pytest.mark.parametrize("cls", list(GRPC_TABLE))
def test_every_class_survives_the_wire(cls: type[MoerelayError]) -> None:
    code, kind = GRPC_TABLE[cls]
    rebuilt = from_grpc(code, "too long", {ERROR_TRAILER: kind, PARAM_TRAILER: "token_ids"})
    assert (type(rebuilt), rebuilt.message, rebuilt.param) == (cls, "too long", "token_ids")


@pytest.mark.parametrize(("trailer", "seconds"), [("7", 7), ("soon", None), ("-1", None), (None, None)])
def test_when_to_retry_survives_the_wire(trailer: str | None, seconds: int | None) -> None:
    code, kind = GRPC_TABLE[errors.OverloadedError]
    trailers = {ERROR_TRAILER: kind} | ({} if trailer is None else {RETRY_AFTER_TRAILER: trailer})
    rebuilt = from_grpc(code, "too long", trailers)
    assert isinstance(rebuilt, errors.OverloadedError)
    assert rebuilt.retry_after_s == seconds


def test_every_message_can_be_encoded() -> None:
    """JSON can spell lone surrogates, and what is quoted from it must not keep an error from its caller."""
    error = errors.CheckpointError("a\ud800b\udcff é", param="\udc80")
    assert (error.message, error.param) == (r"a\ud800b\udcff é", r"\udc80")
    assert str(error) == error.message


def test_bare_statuses_become_the_nearest_class() -> None:
    assert type(from_grpc(grpc.StatusCode.UNAVAILABLE, "", {})) is errors.WorkerLostError
    assert type(from_grpc(grpc.StatusCode.RESOURCE_EXHAUSTED, "", {})) is errors.PayloadTooLargeError
    assert type(from_grpc(grpc.StatusCode.CANCELLED, "", {})) is errors.UnavailableError
    assert type(from_grpc(grpc.StatusCode.UNKNOWN, "", {})) is errors.InternalError
    assert type(from_grpc(grpc.StatusCode.INTERNAL, "", {ERROR_TRAILER: "no such kind"})) is errors.InternalError
