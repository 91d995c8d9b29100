"""Which workers serve together: the group whose first member `leader` names."""

import pytest

from common.pb import types_pb2, worker_pb2
from router.pairing import Member, leader
from tests.fakes.fake_workers import description

PREFILL, DECODE, BOTH = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE, types_pb2.ROLE_BOTH


def member(name: str, role: types_pb2.Role.ValueType, *, healthy: bool = True) -> Member:
    """The first letter of a worker's name is its weights."""
    status = worker_pb2.WorkerStatus(worker_id=name, role=role, model=description(fingerprint=name[0]))
    return Member(status, healthy=healthy, draining=False)


LEADERS: list[tuple[str, list[Member]]] = [
    ("a decode worker before prefill workers", [*(member(f"b{i}", PREFILL) for i in range(3)), member("a1", DECODE)]),
    ("a pair before many that fall back", [member("b1", DECODE), member("b2", DECODE), member("a1", BOTH)]),
    (
        "a pair before a decode worker whose prefill worker is suspect",
        [member("b1", DECODE), member("b2", PREFILL, healthy=False), member("a1", DECODE), member("a2", PREFILL)],
    ),
    ("the larger of two that fall back", [member("b1", DECODE), member("a1", DECODE), member("a2", DECODE)]),
    (
        "of two that fall back the one that may soon do without",
        [member("b1", DECODE), member("b2", DECODE), member("a1", DECODE), member("a2", PREFILL, healthy=False)],
    ),
    (
        "one that falls back now before a pair that is suspect",
        [member("b1", DECODE, healthy=False), member("b2", PREFILL, healthy=False), member("a1", DECODE)],
    ),
]


@pytest.mark.parametrize(("_", "members"), LEADERS, ids=[name for name, _ in LEADERS])
def test_who_serves_together(_: str, members: list[Member]) -> None:
    status = leader(members, fallback=True)
    assert status is not None
    assert status.worker_id == "a1"


def test_a_group_that_may_not_fall_back_is_no_better_than_one_that_cannot_serve() -> None:
    status = leader([member("b1", PREFILL), member("b2", PREFILL), member("a1", DECODE)])
    assert status is not None
    assert status.worker_id == "b1"
