"""Whether two workers, and the router, fit together. Sans-I/O: descriptions in, sentences out."""

from common.pb import worker_pb2
from common.rpc import PROTOCOL_VERSION


def differences(reference: worker_pb2.WorkerStatus, other: worker_pb2.WorkerStatus) -> list[str]:
    """What keeps two workers from being paired, one phrase per field; empty when they fit.

    Every field of ModelDescription counts: an unequal one means other KV bytes, other rows or another end.
    """
    found = []
    if reference.protocol_version != other.protocol_version:
        found.append(_phrase("protocol_version", reference, reference.protocol_version, other, other.protocol_version))
    for field in reference.model.DESCRIPTOR.fields:
        mine, theirs = getattr(reference.model, field.name), getattr(other.model, field.name)
        if field.name == "eos_token_ids":
            mine, theirs = sorted(mine), sorted(theirs)
        if mine != theirs:
            found.append(_phrase(field.name, reference, mine, other, theirs))
    return found


def misfit(status: worker_pb2.WorkerStatus, *, routing_wanted: bool) -> str | None:
    """Why the router itself cannot use a worker; None if it can."""
    if status.protocol_version != PROTOCOL_VERSION:
        return f"speaks protocol version {status.protocol_version}, this router {PROTOCOL_VERSION}"
    if routing_wanted and not status.model.routing_enabled:
        return "runs without routing capture; start it with --enable-return-routed-experts or the router without"
    return None


def _phrase(
    field: str,
    reference: worker_pb2.WorkerStatus,
    mine: object,
    other: worker_pb2.WorkerStatus,
    theirs: object,
) -> str:
    return f"{field} is {mine!r} on {reference.worker_id} and {theirs!r} on {other.worker_id}"
