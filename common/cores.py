"""Which cores this process may use: its affinity mask, its cgroup's quota, and which cpus share a core."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.cpu_list import format_cpus, parse_cpus
from common.errors import ConfigError

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Cores:
    """What may be used of a machine."""

    #: Cpus of each physical core (two where it has hyperthreads), neighbours in memory beside each other.
    cpus_of_core: tuple[tuple[int, ...], ...]
    #: Cpu seconds per second that the cgroup grants; None: as many as there are cpus.
    quota: float | None = None
    #: These cpus were named by the user, or nobody else is kept from choosing the same ones.
    can_pin: bool = True

    @property
    def cpus(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(sorted(cpu for core in self.cpus_of_core for cpu in core))

    @property
    def num_threads(self) -> int:
        """Threads that compute at full speed: one per physical core, and no more than the quota pays for.

        Two that share a core's vector units would only wait for each other, and a process that exceeds its quota
        stands still for the rest of the period (100 ms).
        """
        num_cores = len(self.cpus_of_core)
        return num_cores if self.quota is None else max(1, min(num_cores, int(self.quota)))


def usable_cores(cpus: str | None = None, *, root: Path = _ROOT, mask: Iterable[int] | None = None) -> Cores:
    """The cores of this process, those of `cpus` ("0-3,8") only if given.

    With a quota below the number of cpus, as containers have it, `can_pin` is False unless `cpus` is given: the
    neighbours of a container see the same cpus, and would pin themselves to the same first ones.

    Args:
        root: where /sys and /proc are.
        mask: the affinity mask; by default that of this process.

    Raises:
        ConfigError: `cpus` names one that this process may not use.
    """
    allowed = sorted(mask if mask is not None else affinity())
    chosen = allowed if cpus is None else _chosen(cpus, allowed)
    quota = _quota(root)
    if quota is not None and quota >= len(chosen):
        quota = None
    return Cores(
        cpus_of_core=_by_core(chosen, root),
        quota=quota,
        can_pin=sys.platform == "linux" and (cpus is not None or quota is None),
    )


def num_cores() -> int:
    """Threads that compute at full speed in this process."""
    return usable_cores().num_threads


def pin_thread(cpus: Iterable[int]) -> None:
    """Keeps the calling thread, and those that it starts from now on, on these cpus. Linux only."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cpus)


def pin_process(cpus: Iterable[int]) -> None:
    """Keeps every thread of this process, and those that they start from now on, on these cpus. Linux only."""
    if sys.platform != "linux":
        return
    wanted = set(cpus)
    # Linux pins single threads, and libraries start some while they are imported.
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # ended in this moment
            os.sched_setaffinity(int(thread), wanted)


def affinity() -> set[int]:
    """Cpus that the calling thread may run on."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def _chosen(cpus: str, allowed: list[int]) -> list[int]:
    if sys.platform != "linux":
        raise ConfigError("--cpus: only Linux lets a process choose its cpus; leave it out")
    chosen = parse_cpus(cpus)
    if absent := sorted(set(chosen) - set(allowed)):
        raise ConfigError(f"--cpus {cpus}: this process may use {format_cpus(allowed)} only, not {format_cpus(absent)}")
    return list(chosen)


def _by_core(cpus: list[int], root: Path) -> tuple[tuple[int, ...], ...]:
    """Grouped by physical core, cores ordered by NUMA node; each cpu is its own core where nothing says otherwise."""
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        siblings = _read(folder / "topology/thread_siblings_list")
        first = parse_cpus(siblings)[0] if siblings else cpu
        cores.setdefault((_node(folder), first), []).append(cpu)
    return tuple(tuple(cores[key]) for key in sorted(cores))


def _node(folder: Path) -> int:
    """NUMA node of a cpu: its folder has a link named after it."""
    nodes = [int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")]
    return nodes[0] if nodes else 0


def _quota(root: Path) -> float | None:
    """The tightest quota of this process's cgroup and those above it, of either version of cgroups."""
    quotas = [quota for line in _read(root / "proc/self/cgroup").splitlines() for quota in _quotas_of(line, root)]
    return min(quotas, default=None)


def _quotas_of(line: str, root: Path) -> list[float]:
    """`line` of /proc/self/cgroup: ID:CONTROLLERS:PATH, without controllers in version 2."""
    _, controllers, path = line.split(":", 2)
    mounted = root / "sys/fs/cgroup"
    if not controllers:
        # Beside version 1 it is mounted in a folder, and has no say about cpus.
        read = _quota_v2
    elif "cpu" in controllers.split(","):
        read, mounted = _quota_v1, mounted / "cpu"
    else:
        return []
    # In a container the path may be that of the host, while its own cgroup is what is mounted.
    folders = [
        mounted,
        *(mounted.joinpath(*Path(path).parts[1:depth]) for depth in range(2, len(Path(path).parts) + 1)),
    ]
    return [quota for folder in folders if (quota := read(folder)) is not None]


def _quota_v2(folder: Path) -> float | None:
    """cpu.max: QUOTA PERIOD in microseconds, or max PERIOD."""
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _quota_v1(folder: Path) -> float | None:
    """-1 where there is none."""
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    """Empty where the kernel does not offer the file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
