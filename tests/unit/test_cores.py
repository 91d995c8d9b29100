"""Which cores a process may use, on machines that are folders."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.cores import num_cores, usable_cores
from common.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cpus")

#: Four cores with two hyperthreads each, numbered as Linux does, on two NUMA nodes that take turns.
SIBLINGS = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
NODES = {cpu: cpu % 2 for cpu in range(8)}


def machine(
    root: Path,
    *,
    siblings: Mapping[int, str] | None = None,
    nodes: Mapping[int, int] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A root with /sys and /proc, as far as they are read."""
    texts = dict(files or {})
    for cpu, text in (siblings or {}).items():
        texts[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = text
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    for cpu, node in (nodes or {}).items():
        (root / f"sys/devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    return root


def test_without_a_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    cores = usable_cores(root=tmp_path, mask={5, 1, 3})
    assert (cores.cpus_of_core, cores.cpus, cores.num_threads) == (((1,), (3,), (5,)), (1, 3, 5), 3)
    assert cores.can_pin


def test_hyperthreads_are_one_core_and_nodes_stay_together(tmp_path: Path) -> None:
    cores = usable_cores(root=machine(tmp_path, siblings=SIBLINGS, nodes=NODES), mask=range(8))
    assert cores.cpus_of_core == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert cores.num_threads == 4


def test_a_mask_that_cuts_cores_in_half_leaves_the_halves(tmp_path: Path) -> None:
    cores = usable_cores(root=machine(tmp_path, siblings=SIBLINGS), mask={0, 5, 6, 2})
    assert cores.cpus_of_core == ((0,), (5,), (2, 6))


def test_chosen_cpus_are_a_part_of_the_mask(tmp_path: Path) -> None:
    assert usable_cores("0-1,3", root=tmp_path, mask=range(4)).cpus == (0, 1, 3)
    with pytest.raises(ConfigError, match=r"--cpus 2-5: this process may use 0-3,8 only, not 4-5"):
        usable_cores("2-5", root=tmp_path, mask={0, 1, 2, 3, 8})


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        # A container sees its own cgroup as the root: docker run --cpus 2.5.
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "250000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "max 100000"}, 8),
        # Less than one core still needs a thread.
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "50000 100000"}, 1),
        # More than there is changes nothing.
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "6400000 100000"}, 8),
        # The tightest of all levels, as systemd slices have them.
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.service",
                f"{V2}/a.slice/cpu.max": "300000 100000",
                f"{V2}/a.slice/b.service/cpu.max": "600000 100000",
            },
            3,
        ),
        # Version 1, its hybrid with version 2, and its spelling of none.
        (
            {
                "proc/self/cgroup": "3:cpuset:/\n1:cpu,cpuacct:/kubepods/x\n0::/",
                f"{V1}/kubepods/x/cpu.cfs_quota_us": "400000",
                f"{V1}/kubepods/x/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                f"{V1}/cpu.cfs_quota_us": "-1",
                f"{V1}/cpu.cfs_period_us": "100000",
            },
            8,
        ),
        # Version 1 inside of a container: the path is the host's, what is mounted is its own.
        (
            {
                "proc/self/cgroup": "4:cpuacct,cpu:/docker/abc",
                f"{V1}/cpu.cfs_quota_us": "200000",
                f"{V1}/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ({}, 8),
    ],
)
def test_a_quota_limits_threads(files: dict[str, str], threads: int, tmp_path: Path) -> None:
    assert usable_cores(root=machine(tmp_path, files=files), mask=range(8)).num_threads == threads


def test_under_a_quota_only_chosen_cpus_are_pinned_to(tmp_path: Path) -> None:
    root = machine(tmp_path, files={"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "200000 100000"})
    assert not usable_cores(root=root, mask=range(8)).can_pin
    assert usable_cores("4-7", root=root, mask=range(8)).can_pin
    # Exactly as many as the quota: they may be ours alone.
    assert usable_cores(root=root, mask={6, 7}).can_pin


def test_a_process_bound_to_one_core_counts_one() -> None:
    core = min(os.sched_getaffinity(0))
    program = f"from common.cores import num_cores, pin_thread; pin_thread([{core}]); print(num_cores())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_there_is_at_least_one() -> None:
    assert num_cores() >= 1
