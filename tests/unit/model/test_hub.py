"""Finding a checkpoint: local directories need no network, and what cannot be found is explained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import CheckpointError
from common.model.hub import resolve_model


def _resolve_model(name: str, directory: Path) -> str:
    """Runs the resolver offline, in a process of its own, because the hub's client reads its settings on import."""
    program = (
        "import json, sys\n"
        "from common.errors import CheckpointError\n"
        "from common.model.hub import resolve_model\n"
        "try: print(json.dumps(str(resolve_model(sys.argv[1]))))\n"
        "except CheckpointError as error: print(json.dumps(error.message))\n"
        "assert 'torch' not in sys.modules\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "cache")}
    command = [sys.executable, "-c", program, name]
    output = subprocess.run(command, env=offline, check=True, capture_output=True, text=True)
    message: str = json.loads(output.stdout)
    return message


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/directory", "./missing", "../missing"])
def test_a_path_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        resolve_model(name)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not a directory"):
        resolve_model(str(tmp_path / "file"))


def test_a_name_that_cannot_be_a_hub_id_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^there is no directory two//slashes, and it is no Hugging Face hub id"):
        resolve_model("two//slashes")


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path) -> None:
    message = _resolve_model("some-owner/some-model", tmp_path)
    assert message == (
        "there is no directory some-owner/some-model, and the Hugging Face hub cannot be reached to look for one of "
        "that name; check the path, or the network"
    )
