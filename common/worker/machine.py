"""What a worker asks of its machine before torch is imported: cpus, threads, and memory that does not pile up."""

import ctypes
import gc
import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass

import structlog

from common.config import DecodeSettings, WorkerSettings
from common.cores import affinity, pin_process, pin_thread, usable_cores
from common.cpu_list import format_cpus, parse_cpus
from common.errors import ConfigError

log = structlog.get_logger()

#: oneDNN compiles a kernel for every shape it meets and keeps the last 1024, torch's bridge to it as many per kind of
#: operation; at half a MiB each that grew to 600 MiB of a worker whose weights have 1 MiB. A prefill chunk meets about
#: a hundred shapes (rows per expert), and compiling one takes half a millisecond.
_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "1"}

#: Parameter of glibc's mallopt(3), and how many heaps it may open. By default that is eight per core, each of which
#: keeps what its threads once freed; but one thread computes here, and the others mostly hold the interpreter's lock.
_M_ARENA_MAX, _NUM_ARENAS = -8, 2


#: Cpus that this process may use, before it chooses some of them: under `moerelay up` those of the whole cluster.
_AT_START = frozenset(affinity())


@dataclass(frozen=True, slots=True)
class WorkerCores:
    """Where this process computes."""

    #: Cpus that its engine may run on, "0-3,8".
    cpus: str
    #: Threads of the engine.
    threads: int
    #: Its other threads may run on every cpu that the process was started with.
    spreads: bool = False

    def let_others_go(self) -> None:
        """Once everything is loaded (into memory near the engine's cpus), and before the engine starts.

        What a decode worker streams costs up to a tenth of its engine's time, and its neighbours' cores are often idle.
        A prefill worker stays by itself: what it does beside computing is to send KV, and only while it computes, so
        that its threads would disturb the decode workers just when those are to be left alone.
        """
        if self.spreads:
            pin_process(_AT_START)

    def keep_engine(self) -> None:
        """Keeps the calling thread, which is the engine's, and those that it starts on `cpus`."""
        if self.spreads:
            pin_thread(parse_cpus(self.cpus))


def worker_cores(settings: WorkerSettings) -> WorkerCores:
    """What `settings` ask for, and otherwise every core that this process may use.

    Raises:
        ConfigError: --cpus names one that this process may not use, or --threads more than there are cpus.
    """
    cores = usable_cores(settings.cpus)
    threads = settings.threads or cores.num_threads
    if threads > len(cores.cpus):
        raise ConfigError(
            f"--threads {threads}: this worker has only {len(cores.cpus)} cpus ({format_cpus(cores.cpus)})"
        )
    spreads = settings.cpus is not None and isinstance(settings, DecodeSettings)
    return WorkerCores(format_cpus(cores.cpus), threads, spreads)


def take_cores(settings: WorkerSettings) -> None:
    """Keeps this process on the cpus of --cpus, if given, and logs what is used."""
    cores = worker_cores(settings)
    if settings.cpus is not None:
        pin_process(parse_cpus(settings.cpus))
    log.info("worker_cores", cpus=cores.cpus, threads=cores.threads, pinned=settings.cpus is not None)


def bound_memory(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bounds caches and heaps that would grow for hours. What the user has set in the environment stays.

    Takes effect only before torch is imported, which reads these variables once.
    """
    for name, value in _KERNEL_CACHES.items():
        environ.setdefault(name, value)
    if "MALLOC_ARENA_MAX" not in environ and (libc := _glibc()):
        libc.mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def give_back_memory() -> None:
    """Returns to the system what was freed: after loading, when much was staged that nobody needs again."""
    if libc := _glibc():
        libc.malloc_trim(0)


def keep_what_is_there() -> None:
    """What a process has when it begins to serve (modules, weights) stays for good: the garbage collector need not look
    at it again and again, which took some 2 % of a decode step.
    """
    gc.collect()
    gc.freeze()


def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is one that has these functions."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
