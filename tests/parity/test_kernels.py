"""Native kernels and torch's, in a whole decoder of every family: in fp32 they choose the same experts everywhere, in
bf16 as often as docs/models.md says of two right implementations.
"""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from common.model import native
from common.model.families import FAMILIES, parse_config
from common.routing.record import RoutingArray
from tests.parity.agreement import NUM_TOKENS, random_tokens, text_tokens
from tests.unit.model.harness import Harness, chunk, load_decoder, make_checkpoint

_MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"

#: A prompt in two chunks, and then decode steps, across a multiple of 256.
_BOUNDS = [0, 300, 500, *range(501, NUM_TOKENS + 1)]

#: What docs/models.md grants below the agreement of transformers with itself.
_GRANTED = 0.05


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("family") / request.param, request.param, {})


@pytest.fixture(params=native.available())
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def _expert_sets(checkpoint: Path, tokens: list[int], dtype: torch.dtype, kernels: str) -> RoutingArray:
    """[T, L, K], ids of a layer in ascending order."""
    harness = Harness(load_decoder(checkpoint, dtype, kernels))
    assert harness.decoder.kernels.name == kernels
    blocks = harness.blocks_for(len(tokens))
    for begin, end in pairwise(_BOUNDS):
        harness.runner.execute([chunk(tokens[begin:end], begin, blocks)])
    return np.sort(harness.rows(blocks, len(tokens)), axis=2)


def _documented_agreement(family: str) -> float:
    """Of transformers' bf16 with its own fp32, on the same tokens: the last column of the table."""
    (share,) = re.findall(rf"^\| `{family}` \|.* ([\d.]+) % \|$", _MODELS_PAGE.read_text(), re.M)
    return float(share) / 100


def _all_tokens(checkpoint: Path) -> list[list[int]]:
    return [random_tokens(parse_config(checkpoint).vocab_size), text_tokens(checkpoint)]


def test_fp32_chooses_the_same_sets_for_every_token_and_layer(checkpoint: Path, kernels: str) -> None:
    for tokens in _all_tokens(checkpoint):
        found, expected = (_expert_sets(checkpoint, tokens, torch.float32, name) for name in (kernels, "torch"))
        different = np.argwhere((found != expected).any(axis=2))
        assert not len(different), f"(token, layer) {different[:10].tolist()}"


def test_bf16_agrees_as_often_as_the_documentation_says(checkpoint: Path, kernels: str) -> None:
    """Rows of which all layers are equal: with torch's fp32."""
    equal = [
        np.all(
            _expert_sets(checkpoint, tokens, torch.bfloat16, kernels)
            == _expert_sets(checkpoint, tokens, torch.float32, "torch"),
            axis=(1, 2),
        )
        for tokens in _all_tokens(checkpoint)
    ]
    assert np.mean(equal) > _documented_agreement(parse_config(checkpoint).family) - _GRANTED
