"""Small checkpoints, made once per test process, and single-threaded arithmetic."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.model.synthesize import synthesize
from tests.integration.relay import ADMIN_KEY

#: 2 layers, 8 experts, top-2, 300 ids, context 128, end of sequence 2: the model of the end-to-end tests.
TINY: dict[str, object] = {
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a hundredfold when test processes share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The tiny checkpoint with some values changed; each variant is written once."""
    made: dict[str, Path] = {}

    def make(seed: int = 7, **changes: object) -> Path:
        name = f"{seed}-{'-'.join(f'{key}={value}' for key, value in changes.items())}"
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoint") / "model"
            synthesize("qwen3_moe", "tiny", seed, TINY | changes, made[name])
        return made[name]

    return make


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, Any]:
    """Settings that serve the control routes."""
    (tmp_path / "keys").write_text(ADMIN_KEY)
    return {"admin_on_public_port": True, "admin_key_file": tmp_path / "keys"}
