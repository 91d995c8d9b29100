"""Which processes of a cluster are sampled."""

import os
import subprocess
import sys
from contextlib import ExitStack

from benchmarks.profiling import services

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
    # Several of one kind are numbered, and other tests may have started some of these kinds, too.
    own = [service for service in found if service.pid in pids]
    assert [service.pid for service in own] == pids[:4]
    kinds = [service.name.partition("-")[0] for service in own]
    assert kinds == ["decode_worker", "router", "router.processes", "router.processes"]
    assert len({service.name for service in own}) == 4
