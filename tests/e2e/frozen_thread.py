"""Stops one thread of a child process, which SIGSTOP cannot: a signal stops them all. Linux only."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

#: From linux/ptrace.h and linux/wait.h; ctypes knows no names.
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000


def busiest_thread(pid: int, before: dict[int, float]) -> int:
    """The thread that has computed the most since `before`."""
    return max(cpu_times(pid).items(), key=lambda item: item[1] - before.get(item[0], 0.0))[0]


def cpu_times(pid: int) -> dict[int, float]:
    """Seconds by thread."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}


@contextmanager
def frozen(thread_id: int) -> Iterator[None]:
    """It stands still inside; skips the test where this process may not stop a child's thread."""
    if sys.platform != "linux":
        pytest.skip("only Linux stops single threads")
    try:
        _ptrace(_SEIZE, thread_id)
    except PermissionError as error:
        pytest.skip(f"ptrace is not allowed here: {error}")
    _ptrace(_INTERRUPT, thread_id)
    os.waitpid(thread_id, _WALL)
    try:
        yield
    finally:
        if Path(f"/proc/{thread_id}").exists():
            _ptrace(_DETACH, thread_id)


def _ptrace(request: int, thread_id: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, thread_id, None, None) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
