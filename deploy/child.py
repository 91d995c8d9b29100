"""`python -m deploy.child PARENT_PID MODULE [ARG…]`: becomes `python -m MODULE ARG…`, until its parent dies.

The launcher ends its children itself; this covers the one case where it cannot, its own SIGKILL. Linux sends the
signal asked for below when the parent dies, and keeps doing so after exec. Elsewhere there is no such promise.

`python -m deploy.child PARENT_PID MODULE +IMPORTED` imports IMPORTED first, which takes its time, and then runs MODULE
with the arguments that come as one line of JSON on stdin: for a process whose arguments are known late.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
from importlib import import_module

#: Option of prctl(2): the signal to send to this process when its parent dies.
_PR_SET_PDEATHSIG = 1
#: Begins the name of what is imported before the arguments are known.
LATE = "+"


def main() -> None:
    parent_pid, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        # SIGKILL, not SIGTERM: nobody is left who would force a process that hangs while it drains.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):
        sys.exit(1)  # the parent died before the line above took effect
    if arguments and arguments[0].startswith(LATE):
        import_module(arguments[0].removeprefix(LATE))
        line = sys.stdin.readline()
        if not line:
            sys.exit(1)  # the parent is gone
        sys.argv[1:] = json.loads(line)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    # -P: a folder named "router" in the working directory must not be taken for ours.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


if __name__ == "__main__":
    main()
