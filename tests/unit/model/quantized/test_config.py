"""`quantization_config` as it is published, and what is refused, in words."""

from typing import Any

import pytest

from common.errors import CheckpointError
from common.model.config_reader import ConfigReader
from common.model.quantized.config import MXFP4, Quantization, block_fp8, read_quantization

# As in config.json of deepseek-ai/DeepSeek-V3, DeepSeek-V3.1 and openai/gpt-oss-20b.
_DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_DEEPSEEK_V31 = _DEEPSEEK_V3 | {"scale_fmt": "ue8m0"}
_GPT_OSS = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    "quant_method": "mxfp4",
}


def _read(section: Any, *, fused_experts: bool = True) -> Quantization | None:
    reader = ConfigReader({"quantization_config": section}, "/m/config.json")
    return read_quantization(reader, fused_experts=fused_experts)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, None),
        (_DEEPSEEK_V3, Quantization("fp8", (128, 128))),
        (_DEEPSEEK_V31, Quantization("fp8", (128, 128))),
        (_GPT_OSS, Quantization("mxfp4", (1, 32))),
        ({"quant_method": "fp8"}, Quantization("fp8", (128, 128))),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, Quantization("fp8", (64, 32))),
        ({"quant_method": "fp8", "weight_block_size": None}, Quantization("fp8", None)),
    ],
)
def test_published_forms_are_read(section: Any, expected: Quantization | None) -> None:
    assert _read(section) == expected


def test_a_configuration_without_the_key_is_not_quantised() -> None:
    assert read_quantization(ConfigReader({}, "config.json"), fused_experts=True) is None


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt", "quark"])
def test_other_methods_are_refused_with_what_is_supported(method: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _read({"quant_method": method})
    message = caught.value.message
    assert message.startswith(f"/m/config.json: quantization_config: quant_method is '{method}'")
    assert "'fp8'" in message
    assert "'mxfp4'" in message
    assert "convert" in message


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("fmt", "e5m2", "'e4m3'"),
        ("activation_scheme", "static", "'dynamic'"),
        ("expert_dtype", "fp4", "'fp8'"),
        ("scale_fmt", "e4m3", "'float' or 'ue8m0'"),
        ("weight_block_size", [128], "two positive integers"),
        ("weight_block_size", [128, 0], "two positive integers"),
        ("weight_block_size", [128, 1.5], "two positive integers"),
        ("weight_block_size", [True, 128], "two positive integers"),
        ("weight_block_size", 128, "two positive integers"),
        ("weight_block_size", [128, 65_537], "at most 65536 rows and columns"),
        ("weight_block_size", [2**40, 128], "at most 65536 rows and columns"),
    ],
)
def test_other_variants_of_fp8_are_refused(key: str, value: Any, wanted: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _read(_DEEPSEEK_V3 | {key: value})
    assert f"quantization_config: {key} is {value!r}, but must be {wanted}" in caught.value.message


@pytest.mark.parametrize("section", [{}, {"bits": 4, "group_size": 128}])
def test_a_method_must_be_named(section: Any) -> None:
    with pytest.raises(CheckpointError, match="quantization_config: quant_method is missing"):
        _read(section)


def test_the_section_must_be_an_object() -> None:
    with pytest.raises(CheckpointError, match="quantization_config is 'fp8', but must be an object"):
        _read("fp8")


def test_the_former_key_of_compressed_tensors_is_refused() -> None:
    reader = ConfigReader({"compression_config": {"format": "int-quantized"}}, "config.json")
    with pytest.raises(CheckpointError, match="compression_config is"):
        read_quantization(reader, fused_experts=True)


def test_mxfp4_needs_experts_in_one_tensor() -> None:
    assert _read(_DEEPSEEK_V3, fused_experts=False) == Quantization("fp8", (128, 128))
    with pytest.raises(CheckpointError, match="quant_method is 'mxfp4', but must be 'fp8' in a family whose experts"):
        _read(_GPT_OSS, fused_experts=False)


@pytest.mark.parametrize("quantization", [MXFP4, block_fp8(), block_fp8(16, 8), Quantization("fp8", None)])
def test_what_is_written_reads_back(quantization: Quantization) -> None:
    assert _read(quantization.to_json()) == quantization
