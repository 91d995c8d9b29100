"""deploy/compose.yaml against what Compose v2 reads: the published schema, and a few of its rules. Needs no engine."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compose.stack import FILE


def check(file: Path) -> subprocess.CompletedProcess[str]:
    """Against the schema of compose-spec that check-jsonschema carries."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_file_follows_the_published_schema() -> None:
    done = check(FILE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mistake", ["services:\n  router: {image: x, reed_only: true}\n", "services: [router]\n"])
def test_the_schema_refuses_what_it_does_not_know(tmp_path: Path, mistake: str) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(mistake)
    assert check(file).returncode == 1
