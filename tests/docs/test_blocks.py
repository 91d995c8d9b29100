"""The code of the pages, against one running cluster."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.model.synthesize import synthesize
from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.not_run import BLOCKS, STATEMENTS, left_out, why_not
from tests.e2e.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("docs")]

#: Where the pages say that a cluster listens, and its control port.
PUBLIC_URL, CONTROL_URL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
#: What they call the checkpoint of the next training step.
NEXT_CHECKPOINT = "/checkpoints/42"
#: How many requests a reader sends, and how many are enough here.
MANY, FEW = "--requests 200", "--requests 20"

SHELL = [*blocks("bash", "sh")]
PYTHON_PAGES = list(dict.fromkeys(block.page for block in blocks("python")))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: with a checkpoint in models/tiny, and the examples."""
    path = tmp_path_factory.mktemp("reader")
    # What `make-model` writes by default; its context holds streams that are long enough to be interrupted.
    synthesize("qwen3_moe", "tiny", 0, {}, path / "models" / "tiny")
    (path / "examples").symlink_to(ROOT / "examples")
    return path


@pytest.fixture(scope="module")
def cluster(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--dtype", "float32", "--num-kv-blocks", "400", "--threads", "1", "--admin-port", "0")
    with running_cluster(directory / "models" / "tiny", tmp_path_factory.mktemp("docs"), *flags) as cluster:
        yield cluster


def here(text: str, cluster: Cluster, directory: Path) -> str:
    """The code of a page for this cluster."""
    assert cluster.control_url
    checkpoint = str(directory / "models" / "tiny")
    ours = ((PUBLIC_URL, cluster.url), (CONTROL_URL, cluster.control_url), (NEXT_CHECKPOINT, checkpoint), (MANY, FEW))
    for old, new in ours:
        text = text.replace(old, new)
    return text


def run(directory: Path, *command: str) -> None:
    """The command must succeed."""
    bin_first = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=directory, env=os.environ | bin_first, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, cluster: Cluster, directory: Path) -> None:
    if page == "docs/add-a-model.md":
        pytest.skip("shows a module of moerelay; tests/unit/test_docs_models.py compares it")
    code = "\n".join(block.text for block in blocks("python") if block.page == page)
    run(directory, sys.executable, "-W", "error", "-c", here(code, cluster, directory))


@pytest.mark.parametrize("block", SHELL, ids=[block.name for block in SHELL])
def test_the_commands_of_a_block_succeed(block: Block, cluster: Cluster, directory: Path, tmp_path: Path) -> None:
    if reason := why_not(block):
        pytest.skip(reason)
    commands = "\n".join(statement for statement in block.statements if not left_out(statement))
    # What is written stands beside what is served.
    commands = here(commands, cluster, directory).replace("--out models/", f"--out {tmp_path}/")
    failing = 'set -euo pipefail; curl() { command curl -sS --fail-with-body "$@"; }'
    run(directory, "bash", "-c", f"{failing}\n{commands}")


@pytest.mark.parametrize(("pattern", "reason"), [*BLOCKS, *STATEMENTS])
def test_every_reason_is_needed_and_true(pattern: str, reason: str) -> None:
    texts = [text for block in SHELL for text in (block.text, *block.statements)]
    assert any(re.search(pattern, text) for text in texts)
    for file in re.findall(r"tests/[\w/.]*\w", reason):
        assert (ROOT / file).exists(), file
