"""The number of cores that thread counts derive from."""

import os
import subprocess
import sys

import pytest

from common.process import num_cores


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's affinity mask")
def test_a_process_bound_to_one_core_counts_one() -> None:
    core = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); from common.process import num_cores; print(num_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_there_is_at_least_one() -> None:
    assert num_cores() >= 1
