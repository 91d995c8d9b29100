"""Quantised checkpoints from end to end against transformers' own class with the same weights dequantised.

How weights are dequantised is held against others' arithmetic in tests/unit/model/quantized/ and test_gpt_oss.py.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.model.families import parse_config
from common.model.quantized.config import MXFP4, Quantization, block_fp8
from common.model.synthesize import synthesize
from tests.parity.agreement import Agreement, Bf16Agreement, random_tokens, run_engine
from tests.parity.reference import run_reference

_VARIANTS: dict[str, tuple[str, Quantization]] = {
    "qwen3_moe-fp8": ("qwen3_moe", block_fp8(32, 16)),
    "deepseek_v3-fp8": ("deepseek_v3", block_fp8()),
    "glm4_moe-fp8-whole": ("glm4_moe", Quantization("fp8", None)),
    "gpt_oss-mxfp4": ("gpt_oss", MXFP4),
}


@pytest.fixture(scope="module", params=_VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, quantization = _VARIANTS[request.param]
    path = tmp_path_factory.mktemp("quantized") / "m"
    synthesize(family, "tiny", 0, {}, path, quantization=quantization)
    stored = {tensor.dtype for tensor in load_file(path / "model.safetensors").values()}
    assert stored & {torch.float8_e4m3fn, torch.uint8}
    return path


def test_experts_and_logits_equal_those_of_transformers_in_fp32(checkpoint: Path) -> None:
    config = parse_config(checkpoint)
    tokens = random_tokens(config.vocab_size)
    agreement = Agreement.of(run_engine(checkpoint, tokens), run_reference(checkpoint, tokens))
    assert agreement.num_differing == 0
    assert agreement.logit_error < 1e-4
    assert agreement.num_sets > 400 * len(config.moe_layers)


def test_bf16_rows_are_as_often_those_of_transformers_as_its_own_are(checkpoint: Path) -> None:
    agreement = Bf16Agreement.measure(checkpoint)
    assert agreement.with_bf16 > agreement.yardstick - 0.05
    assert agreement.with_fp32 > agreement.yardstick - 0.05
