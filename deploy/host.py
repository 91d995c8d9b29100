"""What this machine is, as far as it decides how fast a worker is: processor, cores, memory, pages."""

import platform
from dataclasses import dataclass
from pathlib import Path

from common.cores import usable_cores
from common.cpu_list import format_cpus

#: Instructions that kernels are compiled for, or libraries choose theirs by, as Linux spells them on x86-64 and Arm.
TELLING_FLAGS = (
    "avx2", "fma", "bmi2", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni",
    "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Host:
    """Sizes are in bytes; what the system does not tell is None."""

    processor: str
    #: Of TELLING_FLAGS those that the processor has.
    flags: tuple[str, ...]
    #: Cpus that this process may use, "0-3,8", and threads that compute at full speed on them.
    cpus: str
    threads: int
    #: Cpu seconds per second that the cgroup grants, where that is less than there are cpus.
    cpu_quota: float | None
    memory: int | None
    memory_available: int | None
    #: What the cgroup grants; None: no limit.
    memory_limit: int | None
    #: Mode of transparent huge pages: always, madvise or never.
    huge_pages: str | None


def this_host(*, root: Path = _ROOT) -> Host:
    """`root`: where /proc and /sys are."""
    described, memory, cores = _processor(root), _memory(root), usable_cores(root=root)
    flags = set((described.get("flags") or described.get("Features") or "").split())
    return Host(
        processor=described.get("model name") or platform.processor() or platform.machine(),
        flags=tuple(flag for flag in TELLING_FLAGS if flag in flags),
        cpus=format_cpus(cores.cpus),
        threads=cores.num_threads,
        cpu_quota=cores.quota,
        memory=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        memory_limit=_memory_limit(root),
        huge_pages=_huge_pages(root),
    )


def _processor(root: Path) -> dict[str, str]:
    """Fields of the first cpu of /proc/cpuinfo."""
    lines = _read(root / "proc/cpuinfo").split("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _memory(root: Path) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo, which counts in KiB."""
    fields = [line.split() for line in _read(root / "proc/meminfo").splitlines()]
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields if len(field) == 3 and field[1].isdigit()}


def _memory_limit(root: Path) -> int | None:
    """Of the cgroup that is mounted here, which in a container is its own; version 2, then version 1."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _read(root / "sys/fs/cgroup" / name).strip()
        # Version 1 spells "none" as a number near 2^63.
        if limit.isdigit() and int(limit) < 2**62:
            return int(limit)
    return None


def _huge_pages(root: Path) -> str | None:
    """The word in brackets: "always [madvise] never"."""
    _, bracket, rest = _read(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")
    return rest.partition("]")[0] if bracket else None


def _read(path: Path) -> str:
    """Empty where the kernel does not offer the file."""
    try:
        return path.read_text()
    except OSError:
        return ""
