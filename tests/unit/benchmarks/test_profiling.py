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
    # Other tests of this process may have left some of these kinds running: they come between, and count.
    own = [service for service in found if service.pid in pids]
    kinds = {service.pid: service.name.partition("-")[0] for service in own}
    assert kinds == dict(zip(pids[:4], words[:4], strict=True))
    assert len({service.name for service in own}) == 4
