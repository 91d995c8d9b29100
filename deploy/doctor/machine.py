"""Processor, cores, memory and kernels of this machine, and versions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.doctor.check import Check, amount
from deploy.host import Host

_HUGE_PAGES = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True, slots=True)
class Kernels:
    """One set of kernels."""

    name: str
    #: Why it cannot be used; None: it can.
    unavailable: str | None


def all_kernels() -> tuple[Kernels, ...]:
    """Every set that there is, the fastest first. Needs torch."""
    from common.model import native  # late: imports torch

    return (*(Kernels(name, native.why_unavailable(name)) for name in native.VARIANTS), Kernels("torch", None))


def check_machine(host: Host) -> Iterator[Check]:
    """What the machine is, whatever is to run on it."""
    yield Check("processor", "ok", f"{host.processor}: {' '.join(host.flags) or 'unknown instructions'}")
    if host.cpu_quota is None:
        yield Check("cores", "ok", f"{host.threads} (cpus {host.cpus})")
    else:
        found = f"{host.threads} (cpus {host.cpus}); the cgroup grants {host.cpu_quota:g}, fewer than there are"
        yield Check("cores", "warn", found, "workers are not pinned unless --cpus says where to")
    yield Check("memory", "ok", _memory(host))
    if host.huge_pages == "never":
        yield Check("huge pages", "warn", "never, which slows down the reading of weights", _HUGE_PAGES)
    else:
        yield Check("huge pages", "ok", host.huge_pages or "unknown")


def check_torch(torch: str | None) -> Check:
    """`torch`: its version; None: it is not installed."""
    if torch is None:
        return Check("torch", "warn", "not installed, and workers need it", "pip install 'moerelay[worker]'")
    return Check("torch", "ok", torch)


def check_kernels(sets: Sequence[Kernels]) -> Iterator[Check]:
    """A line per set. One that a machine lacks is no fault; to have none but torch is a pity."""
    is_slow = all(kernels.unavailable for kernels in sets if kernels.name != "torch")
    for kernels in sets:
        found = f"{kernels.name:<12} {'yes' if kernels.unavailable is None else f'no: {kernels.unavailable}'}"
        if kernels.name == "torch" and is_slow and kernels.unavailable is None:
            yield Check(
                "kernels", "warn", f"{found}, and nothing faster", "install again where there is a C++ compiler"
            )
        else:
            yield Check("kernels", "ok", found)


def _memory(host: Host) -> str:
    if host.memory is None or host.memory_available is None:
        return "unknown"
    limit = "" if host.memory_limit is None else f", cgroup limit {amount(host.memory_limit)}"
    return f"{amount(host.memory)}, of which {amount(host.memory_available)} are available{limit}"
