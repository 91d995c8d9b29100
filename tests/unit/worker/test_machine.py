"""What a worker asks of its machine."""

import ctypes
import os
import subprocess
import sys

import pytest

from common.config import PrefillSettings
from common.errors import ConfigError
from common.worker.machine import bound_memory, worker_cores

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cpus")


@linux
def test_cpus_and_threads_are_what_was_asked_for() -> None:
    cpu = max(os.sched_getaffinity(0))
    cores = worker_cores(PrefillSettings(model="m", cpus=str(cpu)))
    assert (cores.cpus, cores.threads) == (str(cpu), 1)


@linux
def test_more_threads_than_cpus_are_refused() -> None:
    cpu = min(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=rf"--threads 2: this worker has only 1 cpus \({cpu}\)"):
        worker_cores(PrefillSettings(model="m", cpus=str(cpu), threads=2))


def test_a_cpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cpus 60000"):
        worker_cores(PrefillSettings(model="m", cpus="60000"))


PINNING = """
import os, threading, time
ready, done = threading.Event(), threading.Event()
threading.Thread(target=lambda: (ready.set(), done.wait()), daemon=True).start()
ready.wait()
from common.config import PrefillSettings
from common.worker.machine import take_cores
cpu = min(os.sched_getaffinity(0))
take_cores(PrefillSettings(model="m", cpus=str(cpu)))
print({frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")} == {frozenset({cpu})})
done.set()
"""


@linux
def test_threads_that_were_there_before_are_pinned_too() -> None:
    done = subprocess.run([sys.executable, "-c", PINNING], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_what_the_user_set_stays() -> None:
    environ = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "9"}
    bound_memory(environ)
    assert environ == {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "9", "LRU_CACHE_CAPACITY": "1"}


#: As many shapes as a worker meets in a few hundred requests, three times over.
SHAPES = """
import os, re
from common.worker.machine import bound_memory
bound_memory()
import torch
def rss_mib():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+)", status.read())[1]) // 1024
torch.set_num_threads(1)
weight, keys = torch.ones(192, 64).bfloat16(), torch.ones(4, 64, 256).bfloat16()
def products(rows):
    torch.nn.functional.linear(torch.ones(rows, 64).bfloat16(), weight)
    torch.bmm(torch.ones(4, rows, 64).bfloat16(), keys)
products(1)
before = rss_mib()
for rows in range(2, 800):
    products(rows)
print(rss_mib() - before)
"""


@linux
def test_compiled_kernels_do_not_pile_up() -> None:
    environ = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    done = subprocess.run([sys.executable, "-c", SHAPES], env=environ, capture_output=True, text=True, check=True)
    # 250 kernels of half a MiB or less; all 1600 of them take 650 MiB.
    assert int(done.stdout.splitlines()[-1]) < 250


FREED = """
import re
from common.worker.machine import give_back_memory
def rss_mib():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+)", status.read())[1]) // 1024
pieces = [b"x" * 100_000 for _ in range(2000)]
kept = pieces[-1]  # on top of the heap, which glibc would shorten by itself
del pieces
before = rss_mib()
give_back_memory()
print(before - rss_mib())
"""


@linux
def test_what_was_freed_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library gives memory back by itself")
    assert int(done.stdout) > 100


SPREADING = """
import os, threading
from common.config import {settings}
from common.worker.machine import take_cores, worker_cores
cpu = min(os.sched_getaffinity(0))
everywhere = os.sched_getaffinity(0)
settings = {settings}(model="m", cpus=str(cpu))
take_cores(settings)
cores = worker_cores(settings)
assert os.sched_getaffinity(0) == {{cpu}}
cores.let_others_go()
seen = []
engine = threading.Thread(target=lambda: (cores.keep_engine(), seen.append(os.sched_getaffinity(0))))
engine.start()
engine.join()
print(seen == [{{cpu}}], os.sched_getaffinity(0) == everywhere)
"""


@linux
@pytest.mark.parametrize(("settings", "others"), [("DecodeSettings", True), ("PrefillSettings", False)])
def test_only_decode_workers_stream_from_other_cores(settings: str, others: bool) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there are no other cores")
    program = SPREADING.format(settings=settings)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"True {others}"
