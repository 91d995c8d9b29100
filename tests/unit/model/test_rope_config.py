"""Rotary settings of a config.json: what is filled in, and what is refused, naming the key and the value."""

import math
from typing import Any

import pytest

from common.errors import CheckpointError
from common.model.config import RopeConfig
from common.model.config_reader import ConfigReader
from common.model.rope_config import read_rope, read_rotary_share, read_softmax_scale_factor
from common.model.rope_scaling import DynamicScaling, LinearScaling, LongScaling, YarnScaling

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2, 4.0]}


def read(rotary_dim: int = 4, default_section: dict[str, object] | None = None, **values: Any) -> RopeConfig:
    return read_rope(reader(values), 10_000.0, rotary_dim, default_section=default_section)


def reader(values: dict[str, Any]) -> ConfigReader:
    return ConfigReader({"max_position_embeddings": 131072} | values, "config.json")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rope_theta": 10_000},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {}, "rope_parameters": {}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "default", "factor": 4.0, "attention_factor": 2.0}},
    ],
)
def test_no_scaling(values: dict[str, Any]) -> None:
    assert read(**values) == RopeConfig(theta=10_000.0)


def test_yarn_fills_in_its_defaults() -> None:
    expected = YarnScaling(factor=4.0, original_length=32768, beta_fast=32, beta_slow=1, truncate=True)
    rope = read(rope_scaling=YARN)
    assert rope.scaling == expected
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    assert read(rope_scaling={**YARN, "factor": None}) == read(rope_scaling=YARN)


def test_yarn_of_deepseek_divides_its_two_temperatures() -> None:
    rope = read(rope_scaling={**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5})
    assert rope.attention_factor == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))


@pytest.mark.parametrize(
    ("mscale_all_dim", "expected"), [(1.0, (0.1 * math.log(4) + 1) ** 2), (0, 1.0), (0.0, 1.0), (None, 1.0)]
)
def test_mscale_all_dim_enters_the_softmax_scale_squared(mscale_all_dim: float | None, expected: float) -> None:
    values = reader({"rope_scaling": {**YARN, "mscale_all_dim": mscale_all_dim}})
    assert read_softmax_scale_factor(values) == pytest.approx(expected)


def test_longrope_keeps_both_lists_and_infers_its_attention_factor() -> None:
    rope = read(rope_scaling=LONG, original_max_position_embeddings=4096)
    assert rope.scaling == LongScaling(4096, (1.0, 1.5), (2.0, 4.0))
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_a_length_beside_the_section_goes_first() -> None:
    rope = read(rope_scaling={**LONG, "original_max_position_embeddings": 1024}, original_max_position_embeddings=2048)
    assert isinstance(rope.scaling, LongScaling)
    assert rope.scaling.original_length == 2048


def test_dynamic_scaling_starts_at_the_length_of_the_model() -> None:
    rope = read(rope_scaling={"type": "dynamic", "factor": 2, "original_max_position_embeddings": 5})
    assert rope == RopeConfig(scaling=DynamicScaling(factor=2.0, original_length=131072))


def test_scaling_that_the_family_has_where_no_key_tells() -> None:
    section: dict[str, object] = {"rope_type": "linear", "factor": 2.0}
    assert read(default_section=section).scaling == LinearScaling(2.0)
    assert read(default_section=section, rope_parameters={"rope_theta": 1e4}).scaling is None


@pytest.mark.parametrize(
    ("scaling", "declared", "expected"),
    [
        (None, 1000, 1000),
        ({"type": "linear", "factor": 4.0}, 1000, 4000),
        ({"type": "dynamic", "factor": 2.5}, 1000, 2500),
        # Qwen3 and Qwen2.5, as their model cards say: 4 times 32768 positions, whatever was declared before.
        (YARN, 40960, 131072),
        (YARN, 32768, 131072),
        # DeepSeek-V3, gpt-oss and Llama 3.1 declare the scaled length.
        ({**YARN, "factor": 40, "original_max_position_embeddings": 4096}, 163840, 163840),
        ({**YARN, "factor": 32.0, "original_max_position_embeddings": 4096}, 131072, 131072),
        ({**LLAMA3, "original_max_position_embeddings": 8192}, 131072, 131072),
        ({**LLAMA3, "original_max_position_embeddings": 8192}, 8192, 65536),
        # Without an original length it is the declared one, or follows from it.
        ({"type": "yarn", "factor": 4.0}, 32768, 131072),
        ({"type": "yarn", "original_max_position_embeddings": 1024}, 32768, 32768),
        ({**LONG, "original_max_position_embeddings": 4096}, 131072, 131072),
    ],
)
def test_the_longest_context_is_the_scaled_one(scaling: dict[str, Any] | None, declared: int, expected: int) -> None:
    rope = read(rope_scaling=scaling, max_position_embeddings=declared)
    assert rope.longest_context(declared) == expected


def test_scaling_beside_the_section_of_a_newer_config_keeps_its_base_and_share() -> None:
    """transformers 5 saves base and share there; model cards ask to add `rope_scaling`."""
    newer = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    expected = read(rope_scaling=YARN, rope_theta=1e6)
    assert expected.theta == 1e6
    assert read(rope_scaling=YARN, rope_parameters=newer) == expected
    assert read(rope_scaling={**YARN, "rope_theta": 1e6}, rope_parameters={"rope_type": "default"}) == expected
    assert read(rope_scaling=YARN, rope_parameters={**YARN, "rope_theta": 1e6}) == expected
    assert read(rope_scaling=YARN, rope_parameters={"full_attention": newer}) == expected
    assert read_rotary_share(reader({"rope_scaling": YARN, "rope_parameters": newer}), 1.0) == 0.5


@pytest.mark.parametrize(
    ("scaling", "parameters", "words"),
    [
        (
            {**YARN, "rope_theta": 5e5},
            {"rope_theta": 1e6},
            r"rope_parameters: rope_theta is 1000000\.0.*rope_scaling.*5",
        ),
        (YARN, {**YARN, "factor": 2.0}, r"rope_parameters: factor is 2\.0.*rope_scaling.*4\.0"),
        (YARN, {"rope_type": "linear", "factor": 4.0}, "rope_parameters: rope_type is 'linear'.*rope_scaling.*'yarn'"),
        ({"rope_type": "default"}, YARN, "rope_parameters: rope_type is 'yarn'.*rope_scaling.*'default'"),
        ({"factor": 4.0}, YARN, "rope_parameters: rope_type is 'yarn'.*rope_scaling.*'default'"),
        (
            {**YARN, "partial_rotary_factor": 0.5},
            {"partial_rotary_factor": 0.25},
            r"partial_rotary_factor is 0\.25.*0\.5",
        ),
    ],
)
def test_two_sections_that_contradict_each_other_are_refused(
    scaling: dict[str, Any], parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{words}"):
        read(rope_scaling=scaling, rope_parameters=parameters)


def test_one_section_for_all_layer_types() -> None:
    same = {"full_attention": YARN, "sliding_attention": dict(YARN)}
    assert read(rope_parameters=same) == read(rope_scaling=YARN)
    assert read_rotary_share(reader({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}), 1) == 0.5


@pytest.mark.parametrize(
    "values",
    [
        {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
        {"full_attention": YARN, "sliding_attention": None},
        {"full_attention": YARN, "rope_theta": 1e6},
    ],
)
def test_layer_types_that_differ_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: rope_parameters: full_attention, \w+ differ"):
        read(rope_parameters=values)


@pytest.mark.parametrize(
    ("values", "default", "share"),
    [
        ({}, None, 1.0),
        ({"partial_rotary_factor": 1.0}, None, 1.0),
        ({}, 0.5, 0.5),
        ({"partial_rotary_factor": 0.25}, 0.5, 0.25),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.25}, 0.5, 0.75),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 1}}, 0.5, 1.0),
    ],
)
def test_the_share_of_rotated_dimensions(values: dict[str, Any], default: float | None, share: float) -> None:
    assert read_rotary_share(reader(values), default) == share


@pytest.mark.parametrize(
    ("values", "default", "words"),
    [
        ({"partial_rotary_factor": 0.5}, None, "partial_rotary_factor is 0.5, but must be 1, because"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, None, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 1.5}, 0.5, "partial_rotary_factor is 1.5, but must be at most 1"),
        ({"partial_rotary_factor": 0}, 0.5, "partial_rotary_factor is 0,"),
        ({"partial_rotary_factor": "half"}, 0.5, "partial_rotary_factor is 'half'"),
    ],
)
def test_refused_shares(values: dict[str, Any], default: float | None, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{words}"):
        read_rotary_share(reader(values), default)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ("yarn", "rope_scaling is 'yarn', but must be an object"),
        (0, "rope_scaling is 0, but must be an object"),
        ({"type": "mrope"}, "rope_scaling: rope_type is 'mrope', but must be one of default, linear, dynamic"),
        ({"type": 3}, "rope_type is 3"),
        ({"type": "linear"}, "rope_scaling: factor is missing"),
        ({"type": "linear", "factor": 0}, "factor is 0"),
        ({"type": "linear", "factor": -2.0}, r"factor is -2\.0"),
        ({"type": "linear", "factor": math.nan}, "factor is nan"),
        ({"type": "linear", "factor": math.inf}, "factor is inf"),
        ({"type": "linear", "factor": True}, "factor is True"),
        ({"type": "linear", "factor": 1e200}, r"factor is 1e\+200, but must be at most 1e\+06"),
        ({"type": "dynamic"}, "factor is missing"),
        ({"type": "dynamic", "factor": 0.5}, r"factor is 0\.5, but must be at least 1"),
        ({**LLAMA3, "factor": None}, "factor is missing"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is missing"),
        ({**LLAMA3, "high_freq_factor": 1.0}, r"high_freq_factor is 1\.0, but must be above low_freq_factor, 1"),
        ({**LLAMA3, "original_max_position_embeddings": -1}, "original_max_position_embeddings is -1"),
        ({**YARN, "factor": "4"}, "factor is '4'"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        (
            {**YARN, "original_max_position_embeddings": 1e300},
            r"original_max_position_embeddings is 1e\+300.*at most 2",
        ),
        ({**YARN, "beta_fast": 0.5}, r"beta_fast is 0\.5, but must be at least beta_slow, 1"),
        ({**YARN, "beta_slow": math.nan}, "beta_slow is nan"),
        ({**YARN, "truncate": "no"}, "truncate is 'no'"),
        ({**YARN, "attention_factor": 0.0}, r"attention_factor is 0\.0"),
        ({**YARN, "mscale": -1}, "mscale is -1"),
        ({**YARN, "mscale_all_dim": False}, "mscale_all_dim is False"),
        ({**YARN, "mscale_all_dim": 1e300}, r"mscale_all_dim is 1e\+300, but must be at most 1e\+06"),
        ({**YARN, "mscale": 1e300}, r"mscale is 1e\+300, but must be at most 1e\+06"),
        ({**YARN, "rope_theta": "big"}, "rope_theta is 'big'"),
        ({**LONG, "short_factor": None}, "rope_scaling: short_factor is missing"),
        ({**LONG, "long_factor": 2.0}, r"long_factor is 2\.0, but must be a list"),
        ({**LONG, "long_factor": [1.0]}, r"long_factor is \[1\.0\], but must be a list of 2 numbers"),
        ({**LONG, "short_factor": [1.0] * 3}, "short_factor is .* a list of 2 numbers, one for each rotated pair"),
        ({**LONG, "long_factor": [1.0, 0]}, r"long_factor\[1\] is 0"),
        ({**LONG, "long_factor": [-1.0, 1.0]}, r"long_factor\[0\] is -1\.0"),
        ({**LONG, "short_factor": [1.0, math.nan]}, r"short_factor\[1\] is nan"),
        ({**LONG, "short_factor": [1.0, "1"]}, r"short_factor\[1\] is '1'"),
        ({**LONG, "original_max_position_embeddings": 1}, "original_max_position_embeddings is 1.0"),
        ({**LONG, "attention_factor": math.nan}, "attention_factor is nan"),
    ],
)
def test_refusals_name_key_and_value(scaling: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {words}|config\.json: rope_scaling: {words}"):
        read(rope_scaling=scaling)


@pytest.mark.parametrize("theta", [0, -1e4, 1.0, math.nan, 10**400, "10000", True])
def test_a_base_that_is_none_is_refused(theta: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: rope_theta is"):
        read(rope_theta=theta)


def test_dynamic_scaling_needs_two_pairs() -> None:
    with pytest.raises(CheckpointError, match=r"rope_type is 'dynamic'.*2 dimensions"):
        read(rotary_dim=2, rope_scaling={"type": "dynamic", "factor": 2.0})
