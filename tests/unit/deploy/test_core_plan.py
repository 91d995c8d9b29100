"""Cores of many machines, split by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cores import Cores
from common.cpu_list import format_cpus
from common.errors import ConfigError
from deploy.core_plan import CorePlan, plan_cores


def plain(num_cores: int, quota: float | None = None, *, can_pin: bool = True) -> Cores:
    """Without hyperthreads."""
    return Cores(tuple((cpu,) for cpu in range(num_cores)), quota, can_pin)


def threaded(num_cores: int) -> Cores:
    """Two hyperthreads per core."""
    return Cores(tuple((cpu, cpu + num_cores) for cpu in range(num_cores)))


def written(plan: CorePlan) -> list[str]:
    """THREADS@CPUS of each worker."""
    return [f"{share.threads}@{format_cpus(share.cpus) or 'any'}" for share in plan.shares]


@pytest.mark.parametrize(
    ("cores", "threads", "shares"),
    [
        # One worker, aggregated.
        (plain(1), [None], ["1@0"]),
        (plain(2), [None], ["2@0-1"]),
        # From eight cores on, one is left to router and clients.
        (plain(7), [None], ["7@0-6"]),
        (plain(8), [None], ["7@0-6"]),
        # 1 P + 1 D.
        (plain(2), [None, None], ["1@0", "1@1"]),
        (plain(3), [None, None], ["2@0-1", "1@2"]),
        (plain(4), [None, None], ["2@0-1", "2@2-3"]),
        (plain(8), [None, None], ["4@0-3", "3@4-6"]),
        (plain(9), [None, None], ["4@0-3", "4@4-7"]),
        (plain(64), [None, None], ["32@0-31", "31@32-62"]),
        # 2 P + 1 D, 1 P + 3 D.
        (plain(4), [None] * 3, ["2@0-1", "1@2", "1@3"]),
        (plain(16), [None] * 4, ["4@0-3", "4@4-7", "4@8-11", "3@12-14"]),
        # Hyperthreads: one thread per core, pinned to both of its cpus, nothing set aside.
        (threaded(1), [None], ["1@0-1"]),
        (threaded(4), [None, None], ["2@0-1,4-5", "2@2-3,6-7"]),
        (threaded(8), [None, None], ["4@0-3,8-11", "4@4-7,12-15"]),
        # P:D as asked for, and what is left over in proportion.
        (plain(8), [6, 2], ["6@0-5", "2@6-7"]),
        (plain(16), [6, 2], ["6@0-10", "2@11-14"]),
        (plain(4), [1, 1], ["1@0-1", "1@2-3"]),
        (plain(3), [2, 1], ["2@0-1", "1@2"]),
        (threaded(4), [4, 4], ["4@0-1,4-5", "4@2-3,6-7"]),
        (threaded(4), [6, 2], ["6@0-2,4-6", "2@3,7"]),
    ],
)
def test_cores_of_their_own(cores: Cores, threads: list[int | None], shares: list[str]) -> None:
    plan = plan_cores(cores, threads)
    assert (written(plan), plan.warnings) == (shares, ())


def test_more_workers_than_cores_share_them_prefill_beside_prefill() -> None:
    plan = plan_cores(plain(2), [None] * 4)
    assert written(plan) == ["1@0", "1@0", "1@1", "1@1"]
    assert plan.warnings == ("4 workers share 2 cores; fewer would be faster",)
    assert written(plan_cores(plain(1), [None] * 2)) == ["1@0", "1@0"]
    assert written(plan_cores(plain(2), [None] * 3)) == ["1@0", "1@0", "1@1"]


def test_threads_that_do_not_fit_side_by_side_are_not_pinned() -> None:
    plan = plan_cores(plain(4), [4, 4])
    assert written(plan) == ["4@any", "4@any"]
    assert plan.warnings == ("--threads: 8 threads of 2 workers share 4 cpus, and none is pinned",)


def test_more_threads_than_cpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--threads 5: there are only 4 cpus \(0-3\)"):
        plan_cores(plain(4), [5, 1])
    assert written(plan_cores(threaded(2), [4])) == ["4@0-3"]


@pytest.mark.parametrize(
    ("cores", "threads", "shares"),
    [
        # A container of 4 of 64 cpus: as many threads, wherever the scheduler puts them.
        (plain(64, quota=4, can_pin=False), [None], ["4@any"]),
        (plain(64, quota=4, can_pin=False), [None, None], ["2@any", "2@any"]),
        (plain(64, quota=5.5, can_pin=False), [None, None], ["3@any", "2@any"]),
        (plain(64, quota=16, can_pin=False), [None, None], ["8@any", "7@any"]),
        (plain(64, quota=1, can_pin=False), [None], ["1@any"]),
        # The same with --cpus 0-7.
        (plain(8, quota=4), [None, None], ["2@0-3", "2@4-6"]),
        # Not Linux.
        (plain(8, can_pin=False), [None, None], ["4@any", "3@any"]),
    ],
)
def test_what_a_quota_pays_for(cores: Cores, threads: list[int | None], shares: list[str]) -> None:
    plan = plan_cores(cores, threads)
    assert (written(plan), plan.warnings) == (shares, ())


def test_threads_beyond_the_quota_are_warned_of() -> None:
    plan = plan_cores(plain(64, quota=1.5, can_pin=False), [None, None])
    assert written(plan) == ["1@any", "1@any"]
    assert plan.warnings == ("2 engine threads exceed the cpu limit of 1.5: everything will stand still at times",)


@given(
    st.lists(st.integers(1, 2), min_size=1, max_size=40),
    st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=8),
    st.none() | st.floats(0.1, 50),
    st.booleans(),
)
def test_shares_fit(widths: list[int], threads: list[int | None], quota: float | None, can_pin: bool) -> None:
    cpus = iter(range(100))
    cores = Cores(tuple(tuple(next(cpus) for _ in range(width)) for width in widths), quota, can_pin)
    if any(count is not None and count > len(cores.cpus) for count in threads):
        with pytest.raises(ConfigError, match="--threads"):
            plan_cores(cores, threads)
        return
    plan = plan_cores(cores, threads)
    assert len(plan.shares) == len(threads)
    for share, wanted in zip(plan.shares, threads, strict=True):
        assert share.threads == (wanted or share.threads) >= 1
        assert set(share.cpus) <= set(cores.cpus)
        assert not share.cpus or len(share.cpus) >= share.threads
    pinned = [cpu for share in plan.shares for cpu in share.cpus]
    assert len(pinned) == len(set(pinned)) or plan.warnings
