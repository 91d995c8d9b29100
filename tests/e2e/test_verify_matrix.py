"""`moerelay verify` against real clusters of every family, in pools so small that blocks run out all the time."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.model.families import FAMILIES
from common.model.synthesize import synthesize
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.test_faults import connected

pytestmark = pytest.mark.cluster

#: 160 positions for 32 requests of up to 128; blocks are small, so that sequences grow, and share beginnings, often.
CONTEXT, BLOCK_SIZE, NUM_BLOCKS, NUM_REQUESTS = 128, 4, 40, 80
#: Room for a copy of one preempted sequence or so; the others are computed again.
SWAP_SPACE = "64KiB"
#: The only one in short runs: the family that differs most from the others, with everything that a cluster does.
IN_EVERY_RUN = ("deepseek_v3", "disaggregated", "bfloat16", 16)
VERIFY_TIMEOUT_S = 200

MakeModel = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """The tiny checkpoint of a family; each is written once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "model"
            synthesize(family, "tiny", 11, {}, made[family])
        return made[family]

    return make


def matrix() -> list[object]:
    """Every family in every mode, dtype and chunk size; most of them only in long test runs."""
    return [
        pytest.param(*each, marks=() if each == IN_EVERY_RUN else pytest.mark.slow, id="-".join(map(str, each)))
        for family in FAMILIES
        for mode in ("aggregated", "disaggregated")
        for dtype in ("float32", "bfloat16")
        for chunk in (16, 64)
        for each in [(family, mode, dtype, chunk)]
    ]


@pytest.mark.timeout(600)  # five processes load torch, which takes its time on a busy machine
@pytest.mark.parametrize(("family", "mode", "dtype", "chunk"), matrix())
async def test_no_difference_while_blocks_run_out(
    model_of: MakeModel, tmp_path: Path, family: str, mode: str, dtype: str, chunk: int
) -> None:
    flags = (
        *("--mode", mode, "--dtype", dtype, "--max-num-batched-tokens", str(chunk), "--max-model-len", str(CONTEXT)),
        *("--block-size", str(BLOCK_SIZE), "--num-kv-blocks", str(NUM_BLOCKS), "--swap-space", SWAP_SPACE),
        *("--threads", "1", "--debug-poison-kv"),
    )
    with running_cluster(model_of(family), tmp_path, *flags) as cluster:
        *_, pressure, summary = verify(cluster, model_of(family))
        async with connected(cluster.url) as client:
            preemptions = await client.metric("moerelay_preemptions_total")
            roles = ("prefill", "decode") if mode == "disaggregated" else ("both",)
            hits = [await client.metric("moerelay_prefix_cache_hit_tokens_total", role) for role in roles]
    assert summary == f"verify: {NUM_REQUESTS} requests, 0 differences"
    assert preemptions > 0
    assert min(hits) > 0
    assert [int(number) for number in re.findall(r"\d+", pressure)] == [preemptions, *hits]


def verify(cluster: Cluster, model: Path) -> list[str]:
    """The lines of its report."""
    command = [
        *(sys.executable, "-m", "deploy.cli", "verify", "--url", cluster.url, "--model", str(model)),
        *("--requests", str(NUM_REQUESTS), "--concurrency", "32", "--max-prompt", "48", "--max-output", "40"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=VERIFY_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}\n{cluster.log.read_text()[-4000:]}"
    return done.stdout.splitlines()
