"""Rotary embedding as transformers computes it: the rope section of each family's published checkpoints, and others."""

import importlib
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.model.config import RopeConfig
from common.model.config_reader import ConfigReader
from common.model.rope import RotaryTable, interleaved_rows, rotary_frequencies, rotate
from common.model.rope_config import read_rope, read_rotary_share, read_softmax_scale_factor

CPU = torch.device("cpu")
#: A first and a last position, some between, and one beyond every context here.
POSITIONS = torch.tensor([0, 1, 2, 63, 4095, 4096, 100_003, 200_000])

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_V2 = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 1.7 * i for i in range(32)],
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.5}

#: Family, keys of config.json, rotated dimensions.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen2_moe": ("qwen2_moe", {"hidden_size": 2048, "num_attention_heads": 16, "rope_theta": 1e6}, 128),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 128, "rope_theta": 1e6, "rope_scaling": None}, 128),
    "qwen3_moe-new": (
        "qwen3_moe",
        {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        128,
    ),
    "qwen3_moe-yarn": ("qwen3_moe", {"head_dim": 128, "rope_theta": 1e6, "rope_scaling": _YARN}, 128),
    "qwen3_moe-yarn-new": ("qwen3_moe", {"head_dim": 128, "rope_parameters": {**_YARN, "rope_theta": 1e6}}, 128),
    "qwen3_moe-both": (
        "qwen3_moe",
        {"head_dim": 128, "rope_theta": 1e6, "rope_scaling": _YARN, "rope_parameters": {"rope_type": "default"}},
        128,
    ),
    "mixtral": ("mixtral", {"head_dim": 128, "rope_theta": 1e6}, 128),
    "mixtral-linear": ("mixtral", {"head_dim": 64, "rope_scaling": {"type": "linear", "factor": 3.0}}, 64),
    "mixtral-llama3": ("mixtral", {"head_dim": 64, "rope_theta": 500_000.0, "rope_scaling": _LLAMA3}, 64),
    "mixtral-yarn-explicit": (
        "mixtral",
        {"head_dim": 64, "rope_scaling": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}},
        64,
    ),
    # One width and another: `beta_fast` and `beta_slow` equal, so that the ramp has none.
    "mixtral-yarn-step": (
        "mixtral",
        {"head_dim": 64, "rope_scaling": {**_YARN, "beta_fast": 8.0, "beta_slow": 8.0, "truncate": False}},
        64,
    ),
    "olmoe": ("olmoe", {"hidden_size": 2048, "num_attention_heads": 16, "rope_theta": 10000.0}, 128),
    "deepseek_v2": ("deepseek_v2", {"qk_rope_head_dim": 64, "rope_theta": 10000, "rope_scaling": _V2}, 64),
    "deepseek_v2-lite-temper": (
        "deepseek_v2",
        {"qk_rope_head_dim": 64, "rope_scaling": {**_V2, "mscale": 1.2, "mscale_all_dim": 0.5}},
        64,
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 163840,
            "rope_scaling": {**_V2, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        64,
    ),
    "deepseek_v3-no-mscale": ("deepseek_v3", {"qk_rope_head_dim": 64, "rope_scaling": {**_V2, "mscale": 0}}, 64),
    "gpt_oss": ("gpt_oss", {"head_dim": 64, "rope_theta": 150000, "rope_scaling": _GPT_OSS}, 64),
    "glm4_moe": ("glm4_moe", {"head_dim": 128, "rope_theta": 1e6, "partial_rotary_factor": 0.5}, 64),
    "glm4_moe-new": (
        "glm4_moe",
        {
            "head_dim": 128,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25},
        },
        32,
    ),
    "glm4_moe-absent": ("glm4_moe", {"head_dim": 128, "rope_theta": 1e6}, 64),
    "glm4_moe-yarn": ("glm4_moe", {"head_dim": 128, "rope_scaling": _YARN, "partial_rotary_factor": 0.5}, 64),
    "mixtral-longrope": (
        "mixtral",
        {"head_dim": 64, "original_max_position_embeddings": 4096, "rope_scaling": _LONG},
        64,
    ),
    "mixtral-longrope-factor": (
        "mixtral",
        {"head_dim": 64, "rope_scaling": {**_LONG, "original_max_position_embeddings": 4096, "factor": 8.0}},
        64,
    ),
    "mixtral-longrope-explicit": (
        "mixtral",
        {
            "head_dim": 64,
            "rope_scaling": {**_LONG, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
        },
        64,
    ),
    "mixtral-dynamic": ("mixtral", {"head_dim": 64, "rope_scaling": _DYNAMIC}, 64),
}


def values_of(case: str) -> dict[str, Any]:
    """Copied, because transformers writes into what it is given."""
    values = {"max_position_embeddings": 131072} | CASES[case][1]
    return {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}


def ours(case: str) -> tuple[RopeConfig, int]:
    reader, (family, _, expected_dim) = ConfigReader(values_of(case), "config.json"), CASES[case]
    share = read_rotary_share(reader, 0.5 if family == "glm4_moe" else None)
    rotary_dim = int(expected_dim if family != "glm4_moe" else share * reader.count("head_dim"))
    default_theta = 1e6 if family == "mixtral" else 1e4
    return read_rope(reader, default_theta, rotary_dim), rotary_dim


def theirs(case: str) -> Any:
    """The configuration in transformers."""
    return AutoConfig.for_model(CASES[case][0], **values_of(case))


def modeling(family: str) -> Any:
    """transformers' module of the family."""
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def rotary_module(config: Any) -> Any:
    """The rotary embedding of the configuration's own model class."""
    module = modeling(config.model_type)
    [name] = [name for name in vars(module) if name.endswith("RotaryEmbedding")]
    return getattr(module, name)(config)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers_bit_for_bit(case: str) -> None:
    rope, rotary_dim = ours(case)
    module = rotary_module(theirs(case))
    num_positions = 4096  # the longest context at which no kind here changes its frequencies
    assert rotary_dim == CASES[case][2]
    assert torch.equal(rotary_frequencies(rope, rotary_dim, num_positions), module.inv_freq)
    assert rope.attention_factor == module.attention_scaling


@pytest.mark.parametrize("case", [case for case in CASES if "longrope" not in case and "dynamic" not in case])
def test_cosines_and_sines_are_those_of_transformers(case: str) -> None:
    rope, rotary_dim = ours(case)
    cos, sin = RotaryTable(rope, rotary_dim, CPU, int(POSITIONS.max()) + 1).look_up(POSITIONS)
    module = rotary_module(theirs(case))
    answer = module(torch.zeros(1), POSITIONS[None])
    expected_cos, expected_sin = (answer.real, answer.imag) if torch.is_tensor(answer) else answer
    # Two roundings to fp32 there, one here; the largest values are just above 1.
    torch.testing.assert_close(cos[:, 0], expected_cos[0, :, : rotary_dim // 2], rtol=0.0, atol=2.5e-7)
    torch.testing.assert_close(sin[:, 0], expected_sin[0, :, : rotary_dim // 2], rtol=0.0, atol=2.5e-7)


@pytest.mark.parametrize("num_positions", [1, 131072, 131073, 200_000, 1_000_000])
def test_dynamic_frequencies_are_those_of_the_longest_sequence(num_positions: int) -> None:
    rope, rotary_dim = ours("mixtral-dynamic")
    config = theirs("mixtral-dynamic")
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=num_positions)
    unscaled, _ = ROPE_INIT_FUNCTIONS["dynamic"](config)
    frequencies = rotary_frequencies(rope, rotary_dim, num_positions)
    assert torch.equal(frequencies, expected)
    assert torch.equal(frequencies, unscaled) == (num_positions <= 131072)


@pytest.mark.parametrize("case", ["mixtral-longrope", "mixtral-longrope-factor", "mixtral-longrope-explicit"])
@pytest.mark.parametrize("num_positions", [1, 4096, 4097, 131072])
def test_longrope_frequencies_are_those_of_the_longest_sequence(case: str, num_positions: int) -> None:
    rope, rotary_dim = ours(case)
    module = rotary_module(theirs(case))
    module(torch.zeros(1), torch.tensor([[num_positions - 1]]))  # which makes it choose
    assert torch.equal(rotary_frequencies(rope, rotary_dim, num_positions), module.inv_freq)
    assert rope.attention_factor == module.attention_scaling


def heads(seed: int, num_heads: int = 3, head_dim: int = 64) -> torch.Tensor:
    return torch.randn(len(POSITIONS), num_heads, head_dim, generator=torch.Generator().manual_seed(seed))


def doubled(cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers passes them: [1, T, 2 R], every pair's value twice."""
    return cos_T1R[None, :, 0].repeat(1, 1, 2), sin_T1R[None, :, 0].repeat(1, 1, 2)


def test_the_dimensions_beyond_the_rotated_ones_pass() -> None:
    rope, rotary_dim = ours("glm4_moe")
    cos, sin = RotaryTable(rope, rotary_dim, CPU, 200_001).look_up(POSITIONS)
    q_TND, k_TND = heads(0, head_dim=128), heads(1, head_dim=128)
    expected_q, expected_k = modeling("glm4_moe").apply_rotary_pos_emb(
        q_TND[None], k_TND[None], *doubled(cos, sin), unsqueeze_dim=2
    )
    assert torch.equal(rotate(q_TND, cos, sin), expected_q[0])
    assert torch.equal(rotate(k_TND, cos, sin), expected_k[0])
    assert torch.equal(rotate(q_TND, cos, sin)[..., 64:], q_TND[..., 64:])


def test_reordered_projections_rotate_interleaved_pairs() -> None:
    rope, rotary_dim = ours("deepseek_v3")
    cos, sin = RotaryTable(rope, rotary_dim, CPU, 200_001).look_up(POSITIONS)
    x_TH, weight = heads(2, 1, 24)[:, 0], heads(3, 64, 24)[0]
    order = interleaved_rows(rotary_dim)
    # One row at a time, so that the order of the rows cannot change how a product is summed.
    plain = torch.stack([(x_TH * row).sum(-1) for row in weight], dim=-1)[:, None]
    reordered = torch.stack([(x_TH * row).sum(-1) for row in weight[order]], dim=-1)[:, None]
    expected, _ = modeling("deepseek_v3").apply_rotary_pos_emb_interleave(
        plain[None], plain[None], *doubled(cos, sin), unsqueeze_dim=2
    )
    assert torch.equal(rotate(reordered, cos, sin), expected[0])


def test_reordered_heads_have_the_products_of_complex_rotation() -> None:
    rope, rotary_dim = ours("deepseek_v2")
    cos, sin = RotaryTable(rope, rotary_dim, CPU, 200_001).look_up(POSITIONS)
    q_TND, k_TND = heads(4), heads(5)
    turned_q, turned_k = modeling("deepseek_v2").apply_rotary_emb(
        q_TND.transpose(0, 1)[None], k_TND.transpose(0, 1)[None], torch.complex(cos[:, 0], sin[:, 0])[None]
    )
    expected = turned_q @ turned_k.transpose(-1, -2)
    order = interleaved_rows(rotary_dim)
    q, k = (rotate(x_TND[..., order], cos, sin).transpose(0, 1) for x_TND in (q_TND, k_TND))
    torch.testing.assert_close(q @ k.transpose(-1, -2), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "scaling", "tempered"),
    [
        ("deepseek_v2", _V2, True),
        ("deepseek_v3", {**_V2, "mscale": 1.0, "mscale_all_dim": 1.0}, True),
        ("deepseek_v3", {**_V2, "mscale_all_dim": 0}, False),
        ("deepseek_v3", {**_V2, "factor": 0.5}, False),
        ("deepseek_v3", {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}, True),
        ("deepseek_v3", {"rope_type": "default", "mscale_all_dim": 1.0, "factor": 40}, False),
        ("deepseek_v2", None, False),
    ],
)
def test_the_scale_of_latent_attention(family: str, scaling: dict[str, Any] | None, tempered: bool) -> None:
    values: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "max_position_embeddings": 163840,
    }
    config = AutoConfig.for_model(family, **values, rope_scaling=scaling and dict(scaling))
    name = {"deepseek_v2": "DeepseekV2Attention", "deepseek_v3": "DeepseekV3Attention"}[family]
    attention = getattr(modeling(family), name)(config, 0)
    factor = read_softmax_scale_factor(ConfigReader({**values, "rope_scaling": scaling}, "config.json"))
    assert 12**-0.5 * factor == pytest.approx(attention.scaling, rel=1e-15)
    assert (factor > 1) == tempered
