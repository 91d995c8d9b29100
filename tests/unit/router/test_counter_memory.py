"""What several router processes count in one memory: sums never fall, whoever dies and whoever is asked."""

import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.counters import CounterFamily, ProcessFamilies
from router.latency import LatencyHistogram
from router.processes.counter_memory import PART_BYTES, CounterMemory, counter_file

COUNT = 3


class Processes:
    """Several in one: what each has mapped. `replace` has the effect that one dies and another takes its place."""

    def __init__(self) -> None:
        self.bytes = bytearray(COUNT * PART_BYTES)
        self.all = [self._map(index) for index in range(COUNT)]

    def _map(self, index: int) -> CounterMemory:
        return CounterMemory(memoryview(self.bytes), index, COUNT)

    def replace(self, index: int) -> None:
        self.all[index] = self._map(index)


@pytest.fixture
def processes() -> Processes:
    return Processes()


def requests(memory: CounterMemory) -> tuple[CounterFamily, CollectorRegistry]:
    registry = CollectorRegistry()
    return CounterFamily("requests", "Requests.", memory, registry, outcome=("finished", "error")), registry


def total(registry: CollectorRegistry, outcome: str) -> float | None:
    return registry.get_sample_value("requests_total", {"outcome": outcome})


def test_whoever_is_asked_knows_the_sum(processes: Processes) -> None:
    families = [requests(memory) for memory in processes.all]
    for (family, _), number in zip(families, (1, 20, 300), strict=True):
        family.inc("finished", by=number)
    for _, registry in families:
        assert (total(registry, "finished"), total(registry, "error")) == (321, 0)


def test_a_replacement_goes_on_where_the_dead_one_was(processes: Processes) -> None:
    families = [requests(memory) for memory in processes.all]
    families[0][0].inc("error", by=5)
    families[1][0].inc("error", by=7)
    processes.replace(1)
    assert total(families[0][1], "error") == 12
    family, registry = requests(processes.all[1])
    assert total(registry, "error") == 12
    family.inc("error")
    assert [total(registry, "error") for registry in (families[0][1], registry)] == [13, 13]


def test_a_process_that_has_not_begun_adds_nothing(processes: Processes) -> None:
    family, registry = requests(processes.all[2])
    family.inc("finished", by=4)
    assert total(registry, "finished") == 4


def test_a_histogram_is_that_of_all(processes: Processes) -> None:
    registries = [CollectorRegistry() for _ in range(COUNT)]
    for memory, registry, value in zip(processes.all, registries, (0.5, 2.0, 9.0), strict=True):
        LatencyHistogram("wait_seconds", "Waiting.", (1, 5), memory, registry).observe(value)
    for registry in registries:
        buckets = [registry.get_sample_value("wait_seconds_bucket", {"le": bound}) for bound in ("1.0", "5.0", "+Inf")]
        assert buckets == [1, 2, 3]
        assert registry.get_sample_value("wait_seconds_count") == 3
        assert registry.get_sample_value("wait_seconds_sum") == 11.5


def test_what_another_version_counted_otherwise_is_left_out(processes: Processes) -> None:
    """The code on the disk may change before a process is replaced."""
    processes.all[0].reserve("tokens", 2).own[1] = 8
    now = processes.all[1].reserve("tokens", 3)
    now.own[2] = 5
    assert now.totals() == [0, 0, 5]


def test_a_process_that_died_in_the_middle_of_an_entry_has_added_nothing(processes: Processes) -> None:
    """All of its bytes are there, but for the word before them, which says where the part ends."""
    name = b"other".ljust(16, b"\0")
    processes.bytes[8 : 8 + 40] = struct.pack("=III4x16sd", 16, 1, zlib.crc32(name), name, 3.0)
    cells = processes.all[0].reserve("x", 3)
    assert cells.totals() == [0, 0, 0]
    cells.own[0] = 2
    processes.replace(0)
    assert processes.all[0].reserve("x", 3).totals() == [2, 0, 0]


@pytest.mark.parametrize("seen", [0, 8, 16, 24])
def test_what_arrives_after_the_word_that_announces_it_is_waited_for(processes: Processes, seen: int) -> None:
    """Processors differ in the order in which they show what another one wrote."""
    processes.all[0].reserve("a name of sixteen", 1).own[0] = 4
    mine = processes.all[1].reserve("a name of sixteen", 1)
    whole = bytes(processes.bytes[8:PART_BYTES])
    processes.bytes[8 + seen : PART_BYTES] = bytes(PART_BYTES - 8 - seen)
    assert mine.totals() == [0]
    processes.bytes[8:PART_BYTES] = whole
    assert mine.totals() == [4]


def test_without_anonymous_memory_a_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Python that was built without it."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with counter_file(2) as fd:
        parts = [CounterMemory.mapped(os.dup(fd), index, 2) for index in range(2)]
    parts[0].reserve("x", 1).own[0] = 3
    assert parts[1].reserve("x", 1).totals() == [3]


@pytest.mark.parametrize("length", range(1, 18))
def test_keys_of_every_length(length: int) -> None:
    processes = Processes()
    for key, value in (("k" * length, 1.5), ("é" * length, 2.5)):
        processes.all[0].reserve(key, 1).own[0] = value
    for key, value in (("k" * length, 1.5), ("é" * length, 2.5)):
        assert processes.all[1].reserve(key, 1).totals() == [value]


Step = tuple[str, int, float]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("count", "replace", "ask")),
            st.integers(0, COUNT - 1),
            st.floats(0, 1e9, allow_subnormal=False),
        )
    )
)
def test_no_sum_falls_whatever_happens(steps: list[Step]) -> None:
    processes, seen = Processes(), 0.0
    counted = []
    for what, index, amount in steps:
        if what == "replace":
            processes.replace(index)
            continue
        cells = processes.all[index].reserve("seconds", 1)
        if what == "count":
            cells.own[0] += amount
            counted.append(amount)
        [asked] = cells.totals()
        assert asked >= seen
        seen = asked
    assert seen == pytest.approx(sum(counted))


def test_cpu_time_of_the_dead_stays(processes: Processes) -> None:
    def cpu_s(index: int) -> tuple[CollectorRegistry, float]:
        registry = CollectorRegistry()
        ProcessFamilies(processes.all[index], registry)
        value = registry.get_sample_value("process_cpu_seconds_total")
        assert value is not None
        return registry, value

    first, alone = cpu_s(0)
    _, both = cpu_s(1)
    assert both >= 2 * alone > 0
    processes.replace(1)
    _, after = cpu_s(1)
    assert after >= both + alone
    assert (first.get_sample_value("process_cpu_seconds_total") or 0) >= after
    assert first.get_sample_value("process_start_time_seconds")


#: Counts until it is killed, and says each time that it has.
VICTIM = """
import itertools, sys
from router.processes.counter_memory import CounterMemory
cells = CounterMemory.mapped(int(sys.argv[1]), 1, 2).reserve("requests", 1)
for _ in itertools.count():
    cells.own[0] += 1
    print(flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    if sys.platform == "win32":
        pytest.skip("descriptors are not inherited there")
    with counter_file(2) as fd:
        yield fd


def test_sigkill_loses_nothing(descriptor: int) -> None:
    mine = CounterMemory.mapped(os.dup(descriptor), 0, 2).reserve("requests", 1)
    mine.own[0] += 1000
    for generation in (1, 2):
        command = [sys.executable, "-c", VICTIM, str(descriptor)]
        with subprocess.Popen(
            command, pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as victim:
            assert victim.stdin is not None
            assert victim.stdout is not None
            for number in range(1, 11):
                victim.stdout.readline()
                assert mine.totals() == [1000 + 10 * (generation - 1) + number]
                if number < 10:
                    victim.stdin.write("\n")
                    victim.stdin.flush()
            victim.kill()
            assert victim.wait() == -signal.SIGKILL
        assert mine.totals() == [1000 + 10 * generation]
