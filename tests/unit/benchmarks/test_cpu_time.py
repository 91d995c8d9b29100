"""CPU time of another process: finer than a tick, and with that of threads that ended."""

import subprocess
import sys

import psutil
import pytest

from benchmarks.cpu_time import process_cpu_s
from benchmarks.router import Server

#: Uses about 30 ms on a thread that ends, and says by its own clock how much it has used so far, whenever it is asked.
WORKER = """
import threading, time
def spin():
    while time.thread_time_ns() < 30_000_000:
        pass
thread = threading.Thread(target=spin)
thread.start()
thread.join()
while True:
    print(time.process_time_ns(), flush=True)
    input()
"""


def test_it_is_the_process_s_own_count() -> None:
    if sys.platform != "linux":
        pytest.skip("elsewhere it is in ticks")
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=-1, stdout=-1, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        told_s = int(worker.stdout.readline()) / 1e9
        found_s = process_cpu_s(worker.pid)
        worker.stdin.write("\n")
        worker.stdin.flush()
        # Between the two it has printed a number and waited: far less than a tick.
        assert 0.030 <= told_s <= found_s <= int(worker.stdout.readline()) / 1e9
        worker.kill()
    with pytest.raises((OSError, psutil.NoSuchProcess)):
        process_cpu_s(worker.pid)


def test_children_count_whoever_listens() -> None:
    child = "print(1, flush=True); input()"
    parent = f"import subprocess, sys\nwith subprocess.Popen([sys.executable, '-c', {child!r}]): input()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=-1, stdout=-1, text=True) as started:
        assert started.stdout is not None
        started.stdout.readline()
        server = Server.at("http://127.0.0.1:1", started.pid)
        [inner] = psutil.Process(started.pid).children()
        assert sorted(server.pids) == sorted([started.pid, inner.pid])
        assert server.cpu_s() > process_cpu_s(inner.pid) > 0
        started.communicate("\n\n")
