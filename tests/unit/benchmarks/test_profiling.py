"""Which processes of a cluster are sampled."""

import os
import subprocess
import sys
from contextlib import ExitStack

from benchmarks.profiling import Service, services

#: Serves nothing; its arguments are what is looked at.
IDLE = "print(1, flush=True); input()"


def test_every_process_that_serves_is_found() -> None:
    words = ["decode_worker", "router", "router.processes", "router.processes", "other"]
    with ExitStack() as stack:
        pids = []
        for word in words:
            child = stack.enter_context(subprocess.Popen([sys.executable, "-c", IDLE, word], stdin=-1, stdout=-1))
            assert child.stdout is not None
            child.stdout.readline()
            pids.append(child.pid)
        found = services(os.getpid())
    assert [service for service in found if service.pid in pids] == [
        Service("decode_worker", pids[0]),
        Service("router", pids[1]),
        Service("router.processes-0", pids[2]),
        Service("router.processes-1", pids[3]),
    ]
