"""CPU time of other processes, in nanoseconds: psutil tells ticks of 10 ms, the time of hundreds of events."""

import sys
import time

import psutil

#: Of a clock's id: all threads of a process, those that ended included, by the scheduler's own count. The C library's
#: clock_getcpuclockid(3), which Python does not have, makes the same.
_SCHEDULED = 2
_HAS_CLOCK = sys.platform == "linux"


def process_cpu_s(pid: int) -> float:
    """Seconds of CPU time, user and system, that a living process has taken so far.

    Raises:
        OSError, psutil.NoSuchProcess: there is no such process.
    """
    if _HAS_CLOCK:
        return time.clock_gettime_ns((~pid << 3) | _SCHEDULED) / 1e9
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
