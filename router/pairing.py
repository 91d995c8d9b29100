"""Which workers, and the router, fit together. Sans-I/O: descriptions in, sentences out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from common.pb import types_pb2, worker_pb2
from common.rpc import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Member:
    """A living worker, when it is decided who serves together."""

    status: worker_pb2.WorkerStatus
    healthy: bool
    draining: bool


class Service(IntEnum):
    """What a group of workers can do; more is better."""

    NONE = 0
    #: Decode workers compute the prompts too, because no prefill worker fits.
    FALLBACK = 1
    FULL = 2


def leader(members: Iterable[Member], *, fallback: bool = False) -> worker_pb2.WorkerStatus | None:
    """The first worker of the group that serves; a group is all workers with the same description.

    A group that can serve goes before one that cannot, one with prefill workers before one that falls back (if
    `fallback` allows that), a larger one before a smaller one, then the one whose first member comes first. So one
    worker that was started wrong never takes the others down.
    """
    groups: dict[bytes, list[Member]] = {}
    for member in members:
        groups.setdefault(_description(member.status), []).append(member)
    return max(groups.values(), key=partial(_rank, fallback=fallback))[0].status if groups else None


def _rank(group: Sequence[Member], *, fallback: bool) -> tuple[Service, Service, int]:
    now = _service([member for member in group if member.healthy], fallback=fallback)
    return now, _service(group, fallback=fallback), sum(not member.draining for member in group)


def _service(group: Sequence[Member], *, fallback: bool) -> Service:
    roles = {member.status.role for member in group}
    if types_pb2.ROLE_BOTH in roles or {types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE} <= roles:
        return Service.FULL
    return Service.FALLBACK if fallback and types_pb2.ROLE_DECODE in roles else Service.NONE


def _description(status: worker_pb2.WorkerStatus) -> bytes:
    """Equal for two workers exactly if `differences` finds none."""
    same = worker_pb2.WorkerStatus(protocol_version=status.protocol_version, model=status.model)
    same.model.eos_token_ids.sort()
    return same.SerializeToString(deterministic=True)


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
