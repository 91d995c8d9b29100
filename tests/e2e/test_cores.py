"""Where the threads of a real cluster may run, as the kernel tells it."""

import sys
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from common.cores import usable_cores
from common.cpu_list import format_cpus
from tests.e2e.cluster import running_cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cpus")


def allowed_cpus(pid: int) -> set[str]:
    """Cpus of each thread, as /proc spells them."""
    statuses = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            statuses.append(path.read_text())
    return {line.split()[1] for status in statuses for line in status.splitlines() if "Cpus_allowed_list" in line}


async def test_each_engine_keeps_to_its_core_and_the_router_to_none(tiny_model: Path, tmp_path: Path) -> None:
    cores = usable_cores().cpus_of_core
    if len(cores) < 2:
        pytest.skip("two workers need two cores")
    first, second = cores[0][0], cores[1][0]
    flags = ("--dtype", "float32", "--num-kv-blocks", "40", "--cpus", f"{first},{second}")
    with running_cluster(tiny_model, tmp_path, *flags) as cluster:
        async with aiohttp.ClientSession() as session, session.get(f"{cluster.url}/cluster") as answer:
            prefill, decode = (await answer.json())["workers"]
        assert [(w["id"], w["cpus"], w["threads"]) for w in (prefill, decode)] == [
            ("prefill-0", str(first), 1),
            ("decode-0", str(second), 1),
        ]
        assert allowed_cpus(prefill["pid"]) == {str(first)}
        # The engine; what streams its tokens goes wherever there is room.
        assert allowed_cpus(decode["pid"]) == {str(second), format_cpus([first, second])}
        children = psutil.Process(cluster.process.pid).children()
        [router] = [child for child in children if child.pid not in (prefill["pid"], decode["pid"])]
        assert set(router.cpu_affinity()) == {first, second}
