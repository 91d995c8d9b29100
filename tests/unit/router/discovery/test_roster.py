"""Who is known, from what is listed now and who still serves somebody."""

import time

import pytest
from structlog.testing import capture_logs

from common.pb import types_pb2, worker_pb2
from router.dependence import Dependence
from router.discovery.listing import Listing
from router.discovery.roster import Roster
from router.worker import Side, Worker
from router.worker_state import State
from tests.fakes.fake_resolver import FakeResolver


class QuietWorker(Worker):
    """Is told what a heartbeat would find out."""

    def __init__(self, address: str, side: Side) -> None:
        super().__init__(address, side, max_message_bytes=2**20, silence_limit_s=1e9)

    def hear(self, instance_id: str = "") -> None:
        role = types_pb2.ROLE_PREFILL if self.side == "prefill" else types_pb2.ROLE_DECODE
        self.status = worker_pb2.WorkerStatus(instance_id=instance_id or self.address, role=role)
        self._state.heard(time.monotonic(), draining=False)

    def die(self) -> None:
        self._state.missed()
        self._state.missed()


class Rig:
    """One side of which a resolver tells, and what became of it."""

    def __init__(self, *addresses: str) -> None:
        self.resolver = FakeResolver(*addresses)
        self.listing = Listing("decode", "dns://decode:7002", self.resolver)
        self.made: list[QuietWorker] = []
        self.roster = Roster([self.listing], self._connect)

    def _connect(self, address: str, side: Side) -> Worker:
        self.made.append(QuietWorker(address, side))
        return self.made[-1]

    async def look(self, *addresses: str, failure: str | None = None) -> list[str]:
        """Looks once more; the addresses of those that are dropped."""
        self.resolver.addresses, self.resolver.failure = addresses, failure
        await self.listing.refresh()
        return [worker.address for worker in self.roster.update()]

    @property
    def known(self) -> list[str]:
        return [worker.address for worker in self.roster.workers]

    def __getitem__(self, address: str) -> QuietWorker:
        return next(worker for worker in self.made if worker.address == address)


async def test_workers_come_and_go_with_what_is_listed() -> None:
    rig = Rig()
    assert (rig.known, rig.roster.was_asked("decode")) == ([], False)
    assert await rig.look("a:1", "b:1") == []
    assert (rig.known, rig.roster.was_asked("decode")) == (["a:1", "b:1"], False)
    assert await rig.look("b:1", "c:1") == ["a:1"]
    assert rig.known == ["b:1", "c:1"]
    assert len(rig.made) == 3, "those that stay are kept"
    for worker in rig.made:
        worker.was_asked = True
    assert rig.roster.was_asked("decode")


async def test_workers_tell_what_lists_them() -> None:
    rig = Rig()
    await rig.look("a:1", "b:1")
    static = Listing("decode", "b:1", None)
    roster = Roster([static, rig.listing], lambda address, side: QuietWorker(address, side))
    assert [(worker.address, worker.source) for worker in roster.workers] == [
        ("b:1", "b:1"),
        ("a:1", "dns://decode:7002"),
    ]
    # One that leaves has been found where it was.
    assert rig["a:1"].source == "dns://decode:7002"
    with Dependence([rig["a:1"]]):
        rig["a:1"].hear()
        await rig.look("b:1")
        assert (rig["a:1"].listed, rig["a:1"].source) == (False, "dns://decode:7002")


async def test_a_worker_that_is_listed_no_more_finishes_what_it_has() -> None:
    rig = Rig()
    await rig.look("a:1", "b:1")
    rig["a:1"].hear()
    with Dependence([rig["a:1"]]):
        assert await rig.look("b:1") == []
        assert rig.known == ["b:1", "a:1"]
        assert (rig["a:1"].state, rig["a:1"].usable) == (State.DRAINING, False)
        assert await rig.look("a:1", "b:1") == []
        assert (rig.known, rig["a:1"].state) == (["a:1", "b:1"], State.HEALTHY)
        assert await rig.look("b:1") == []
    assert await rig.look("b:1") == ["a:1"]
    with Dependence([rig["b:1"]]):
        rig["b:1"].die()
        assert await rig.look("c:1") == ["b:1"], "what it had is lost anyway"


async def test_a_lookup_that_fails_changes_nothing() -> None:
    rig = Rig()
    await rig.look("a:1", "b:1")
    rig["a:1"].hear()
    rig["b:1"].die()
    assert await rig.look(failure="no name server answers") == []
    assert (rig.known, rig.listing.failure) == (["a:1", "b:1"], "no name server answers")
    assert await rig.look("a:1") == ["b:1"]
    assert rig.listing.failure is None


async def test_an_empty_answer_drops_the_dead_only() -> None:
    rig = Rig()
    await rig.look("a:1", "b:1")
    rig["a:1"].hear()
    rig["b:1"].die()
    assert await rig.look() == ["b:1"]
    assert (rig.known, rig["a:1"].state) == (["a:1"], State.HEALTHY)
    rig["a:1"].die()
    assert await rig.look() == ["a:1"]
    assert rig.known == []


async def test_changes_are_logged_once() -> None:
    rig = Rig()
    with capture_logs() as logs:
        await rig.look()
        await rig.look()
        for _ in range(3):
            await rig.look(failure="no name server answers")
        await rig.look("a:1")
        await rig.look("a:1")
        await rig.look("b:1")
        await rig.look(failure="no name server answers")
    told = [(entry["event"], entry["log_level"]) for entry in logs]
    nobody, failed = ("discovery_found_nobody", "warning"), ("discovery_failed", "warning")
    changed = ("discovery_changed", "info")
    assert told == [nobody, failed, changed, changed, failed]
    assert (logs[3]["added"], logs[3]["removed"]) == (["b:1"], ["a:1"])
    assert (logs[4]["source"], logs[4]["kept"]) == ("dns://decode:7002", ["b:1"])
    assert logs[4]["reason"] == "no name server answers"


async def test_a_process_at_two_addresses_is_one_worker() -> None:
    rig = Rig()
    await rig.look("a:1", "b:1", "c:1")
    for address, instance in (("a:1", "x"), ("b:1", "x"), ("c:1", "y")):
        rig[address].hear(instance)
    assert rig.known == ["a:1", "c:1"]
    assert [worker.address for worker in rig.roster.members] == ["a:1", "b:1", "c:1"]
    rig["a:1"].die()
    assert rig.known == ["a:1", "b:1", "c:1"], "its other address is used"


async def test_both_sides_and_static_addresses() -> None:
    resolver = FakeResolver("p1:1", "p0:1")
    listings = [
        Listing("prefill", "p0:1", None),
        Listing("prefill", "dns://p:1", resolver),
        Listing("decode", "p0:1", None),
    ]
    roster = Roster(listings, QuietWorker)
    await listings[1].refresh()
    assert roster.update() == []
    assert [(worker.side, worker.address) for worker in roster.workers] == [
        ("prefill", "p0:1"),
        ("prefill", "p1:1"),
        ("decode", "p0:1"),
    ]
    for worker in roster.workers:
        assert isinstance(worker, QuietWorker)
        worker.hear("same")
    assert len(roster.workers) == 2, "on both sides it may be, and is refused on one"
    resolver.addresses = ["p1:1"]
    await listings[1].refresh()
    assert roster.update() == [], "it is still listed by itself"


def test_an_address_is_not_looked_up() -> None:
    listing = Listing("prefill", "p0:1", None)
    assert (listing.is_static, listing.was_asked, listing.addresses) == (True, True, ["p0:1"])
    with pytest.raises(AssertionError):
        listing.refresh().send(None)
