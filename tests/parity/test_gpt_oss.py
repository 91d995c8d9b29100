"""gpt-oss in transformers, fp32: logits to 1e-4 and the same experts, plain and from MXFP4.

Prompts are longer than the window and than two tiles of keys.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from common.model.quantized.config import MXFP4
from common.model.synthesize import synthesize
from tests.parity.agreement import Agreement, Answer
from tests.parity.reference import run_reference
from tests.unit.model.harness import Harness, load_decoder, make_checkpoint, solo_run

_NUM_TOKENS = 600

_FULL_FIRST = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]

_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Small enough to clamp most values, and another slope than the published one.
    "clamped": {"swiglu_limit": 0.7, "swiglu_alpha": 1.1},
    "other-layers": {"layer_types": _FULL_FIRST, "sliding_window": 300},
    "no-attention-bias": {"attention_bias": False, "num_key_value_heads": 1},
    "default-scaling": {"rope_scaling": None, "max_position_embeddings": 4096},
    "every-expert": {"num_experts_per_tok": 8, "num_hidden_layers": 2},
    "tied": {"tie_word_embeddings": True},
}


@pytest.fixture(params=_VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "m", "gpt_oss", _VARIANTS[request.param])


def _random_tokens() -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, 512, _NUM_TOKENS)]


def _load_reference(path: Path, **settings: Any) -> Any:
    """transformers' model; nothing of the checkpoint was missing or left over."""
    loaded: Any = GptOssForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **settings
    )
    model, report = loaded
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def test_transformers_finds_every_tensor(checkpoint: Path) -> None:
    assert _load_reference(checkpoint).config.model_type == "gpt_oss"


def test_logits_and_experts_equal_those_of_transformers(checkpoint: Path) -> None:
    tokens, decoder = _random_tokens(), load_decoder(checkpoint)
    reference = run_reference(checkpoint, tokens)
    harness = Harness(decoder)
    blocks = harness.blocks_for(_NUM_TOKENS)
    bounds = [0, 31, 200, 201, 202, 400, 512, _NUM_TOKENS]
    logits = torch.cat([harness.all_logits(tokens[a:b], a, blocks) for a, b in pairwise(bounds)])
    rows = harness.rows(blocks, _NUM_TOKENS)

    torch.testing.assert_close(logits, reference.logits_TV, rtol=0, atol=1e-4)
    assert reference.ids_TMK.shape == rows.shape
    agreement = Agreement.of(Answer(logits, rows), reference)
    assert agreement.num_differing == 0
    assert agreement.num_sets > 400 * len(reference.moe_layers)


@torch.inference_mode()
def test_mxfp4_logits_equal_those_of_transformers_that_dequantises(tmp_path: Path) -> None:
    synthesize("gpt_oss", "tiny", 0, {}, tmp_path / "m", quantization=MXFP4)
    tokens = _random_tokens()
    model = _load_reference(tmp_path / "m", quantization_config=Mxfp4Config(dequantize=True))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(solo_run(load_decoder(tmp_path / "m"), tokens).logits, expected, rtol=0, atol=1e-4)


def test_a_checkpoint_that_transformers_saved_gives_the_same_logits(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "gpt_oss", {})
    _load_reference(path).save_pretrained(tmp_path / "saved")
    tokens = _random_tokens()[:300]
    expected = solo_run(load_decoder(path), tokens).logits
    assert torch.equal(solo_run(load_decoder(tmp_path / "saved"), tokens).logits, expected)
