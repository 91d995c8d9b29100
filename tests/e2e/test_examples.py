"""The examples, against a running cluster."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.model.synthesize import synthesize
from tests.e2e.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("examples")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make-model` writes by default; its context holds streams that are long enough to be interrupted."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    synthesize("qwen3_moe", "tiny", 0, {}, path)
    return path


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--dtype", "float32", "--num-kv-blocks", "400", "--threads", "1", "--admin-port", "0")
    with running_cluster(checkpoint, tmp_path_factory.mktemp("examples"), *flags) as cluster:
        yield cluster


def ended(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The example, after it has ended in whatever way."""
    command = (sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def example(name: str, *arguments: str) -> str:
    """What the example prints; it must succeed."""
    done = ended(name, *arguments)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_stream_rows(cluster: Cluster) -> None:
    assert "16 tokens, rows (20, 4, 2)" in example("stream_rows.py", cluster.url)


def test_chat_openai(cluster: Cluster) -> None:
    printed = example("chat_openai.py", f"{cluster.url}/v1")
    assert "16 tokens, logprob -" in printed
    assert re.search(r"polite: (True|False)|cut off", printed)


def test_sglang_rollout(cluster: Cluster) -> None:
    printed = example("sglang_rollout.py", cluster.url)
    assert printed.count("rows") == 5
    assert "two turns:" in printed


def test_pause_update_resume(cluster: Cluster, checkpoint: Path) -> None:
    assert cluster.control_url
    printed = example("pause_update_resume.py", cluster.url, cluster.control_url, str(checkpoint))
    assert "while 1 request(s) stood still" in printed
    assert len(re.findall(r"tokens \d+ to \d+: weights", printed)) == 2


def test_an_update_that_fails_leaves_no_pause(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.control_url
    done = ended("pause_update_resume.py", cluster.url, cluster.control_url, str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert done.stderr.startswith("/update_weights: ")
    assert "16 tokens" in example("stream_rows.py", cluster.url)
