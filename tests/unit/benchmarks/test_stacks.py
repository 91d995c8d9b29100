"""Stacks as py-spy writes them, by what the innermost frame is."""

import pytest

from benchmarks.stacks import Shares, shares

LINES = [
    "thread (12): engine;run (loop.py:10);forward (decoder.py:20) 5",
    "thread (12): engine;run (loop.py:10);_PyEval_Vector (libpython3.11.so.1.0) 2",
    "thread (12): engine;run (loop.py:10);call (python3.12) 1",
    "thread (12): engine;run (loop.py:10);torch::THPVariable_add(_object*) (libtorch_python.so) 3",
    "thread (12): engine;run (loop.py:10);at::native::mm (libtorch_cpu.so) 20",
    "thread (12): engine;run (loop.py:10);gemm (kernels.cpython-311-x86_64-linux-gnu.so) 9",
    "thread (12): engine;get (queue.py:5);lock_PyThread_acquire_lock (libpython3.11.so.1.0);0x7f (libc.so.6) 100",
    "thread (11): MainThread;run (app.py:1) 50",
]


def test_each_kind_is_counted() -> None:
    found = shares(LINES, "engine")
    assert found == Shares(python=8, binding=3, native=29)
    assert found.python_share == pytest.approx(11 / 40)


def test_a_thread_that_is_not_there() -> None:
    assert shares(LINES, "other").python_share == 0.0


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="not a stack and a count"):
        shares(["<svg>"], "engine")
