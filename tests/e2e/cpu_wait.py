"""How long processes were kept waiting for a cpu, which on a busy machine is no fault of theirs."""

import os
from pathlib import Path

import psutil


def cpu_wait_s() -> float:
    """Seconds that threads of this process and its children could have run and had no cpu; only differences mean a
    thing, and only on Linux: it is always 0 elsewhere."""
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children())]
    return sum(_thread_wait_ns(path) for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _thread_wait_ns(path: Path) -> int:
    try:
        return int(path.read_text().split()[1])
    except (OSError, IndexError):  # it has ended, or the kernel does not count
        return 0
