"""config.json in every spelling, and what is refused; expected values are those that transformers would use."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from common.model.config import GroupedAttention, ModelConfig, RopeConfig, RouterConfig
from common.model.families import config_from_json, parse_config

#: The shape of a published Qwen3-MoE config.json, in the spelling of transformers 4.
_QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

_MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def _parse(base: dict[str, Any], *, without: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    values = {key: value for key, value in base.items() if key not in without} | changes
    return config_from_json(values, {}, source="config.json")


def test_a_qwen3_moe_config() -> None:
    config = _parse(_QWEN)
    assert (config.num_layers, config.num_experts, config.top_k, config.experts.size) == (48, 128, 8, 768)
    assert config.attention == GroupedAttention(32, 4, 128, rotary_dim=128, qk_norm="head")
    assert config.router == RouterConfig(normalize=True)
    assert config.moe_layers == frozenset(range(48))
    assert config.sliding_windows == (None,) * 48
    assert config.rope == RopeConfig(theta=1_000_000.0)
    assert config.dtype == "bfloat16"
    assert config.routing.dtype.name == "uint8"


def test_a_mixtral_config() -> None:
    config = _parse(_MIXTRAL)
    assert (config.num_experts, config.top_k, config.experts.size) == (8, 2, 14336)
    assert config.attention == GroupedAttention(32, 8, 128, rotary_dim=128)
    assert config.router == RouterConfig(normalize=True)  # always, although no key says so


def test_both_spellings_mean_the_same() -> None:
    renamed = ("num_experts", "rope_theta", "rope_scaling", "torch_dtype")
    newer = {"num_local_experts": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert _parse(_QWEN, without=renamed, dtype="bfloat16", **newer) == _parse(_QWEN)
    assert _parse(_MIXTRAL, without=("num_local_experts",), num_experts=8) == _parse(_MIXTRAL)


def test_absent_keys_take_the_family_defaults() -> None:
    optional = ("rope_theta", "rms_norm_eps", "norm_topk_prob", "torch_dtype", "head_dim", "decoder_sparse_step")
    qwen, mixtral = _parse(_QWEN, without=optional), _parse(_MIXTRAL, without=optional)
    assert (qwen.rope.theta, mixtral.rope.theta) == (10_000.0, 1_000_000.0)
    assert (qwen.rms_norm_eps, mixtral.rms_norm_eps) == (1e-6, 1e-5)
    assert not qwen.router.normalize
    assert (qwen.dtype, qwen.kv_dim) == ("float32", 64)


def test_dense_layers_among_moe_layers() -> None:
    assert _parse(_QWEN, num_hidden_layers=6, decoder_sparse_step=2).moe_layers == {1, 3, 5}
    assert _parse(_QWEN, num_hidden_layers=4, mlp_only_layers=[0, 3]).moe_layers == {1, 2}


def test_sliding_windows() -> None:
    assert _parse(_QWEN, sliding_window=4096).sliding_windows[0] is None
    assert _parse(_QWEN, sliding_window=4096, use_sliding_window=True).sliding_windows == (4096,) * 48
    assert _parse(_MIXTRAL, sliding_window=512).sliding_windows == (512,) * 32


def test_a_context_that_yarn_lengthens_as_the_model_card_says() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert _QWEN["max_position_embeddings"] == 40960
    assert _parse(_QWEN, rope_scaling=yarn).rope.longest_context(40960) == 131072


def test_end_of_sequence_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_QWEN))
    assert parse_config(tmp_path).eos_token_ids == {151645}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert parse_config(tmp_path).eos_token_ids == {151643, 151645}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("value", "words"),
    [(151936, "is 151936, but must be below vocab_size, 151936"), ("</s>", "is '</s>', but must be an integer")],
)
def test_a_wrong_end_of_sequence_id_is_looked_for_in_its_own_file(
    tmp_path: Path, file: str, value: object, words: str
) -> None:
    right = {"config.json": _QWEN, "generation_config.json": {"eos_token_id": [151645]}}
    for name, values in right.items():
        changed = values | {"eos_token_id": value} if name == file else values
        (tmp_path / name).write_text(json.dumps(changed))
    with pytest.raises(CheckpointError) as caught:
        parse_config(tmp_path)
    assert caught.value.message.startswith(f"{tmp_path / file}: eos_token_id {words}")


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (_QWEN, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*qwen3_moe.*mixtral"),
        (_QWEN, {"architectures": ["Qwen3MoeForSequenceClassification"]}, "not supported"),
        (_QWEN, {"model_type": None}, "not supported"),
        (_QWEN, {"architectures": 3}, "architectures is 3, but must be a list of strings"),
        (_QWEN, {"architectures": "Qwen3MoeForCausalLM"}, "architectures is 'Qwen3MoeForCausalLM', but must be a list"),
        (_QWEN, {"architectures": ["Qwen3MoeForCausalLM", 3]}, "architectures is .* but must be a list of strings"),
        (_QWEN, {"head_dim": 10**400}, "head_dim is 1000.*at most 16777216"),
        (_QWEN, {"num_hidden_layers": 60_000_000}, "num_hidden_layers is 60000000, .*at most 10000"),
        (_QWEN, {"num_experts": 2**31 - 1}, "num_experts is 2147483647, .*at most 65536"),
        (_MIXTRAL, {"num_local_experts": 10**6}, "num_local_experts is 1000000, .*at most 65536"),
        (_QWEN, {"num_hidden_layers": 10_000}, "num_experts is 128, .*10000 MoE layers together .*at most 262144"),
        (_QWEN, {"num_experts": 0}, "dense model.*supported"),
        (_MIXTRAL, {"num_local_experts": None}, "dense model"),
        (_QWEN, {"num_hidden_layers": 2, "mlp_only_layers": [0, 1]}, "no MoE layer"),
        (_QWEN, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129.*128"),
        (_QWEN, {"hidden_size": "2048"}, "hidden_size is '2048'"),
        (_QWEN, {"vocab_size": None}, "vocab_size is missing"),
        (_QWEN, {"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        (_QWEN, {"head_dim": 127}, "head_dim is 127"),
        (_QWEN, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (_QWEN, {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (_QWEN, {"eos_token_id": 151936}, "eos_token_id is 151936"),
        (_QWEN, {"eos_token_id": [-1]}, "eos_token_id"),
        (_QWEN, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.*gptq.*fp8"),
        (
            _QWEN,
            {"topk_method": "group_limited_greedy", "n_group": 8},
            "topk_method is 'group_limited_greedy'.*'greedy'",
        ),
        (_QWEN, {"rope_scaling": {"rope_type": "mrope"}}, "rope_type is 'mrope'.*yarn"),
        (_QWEN, {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (_QWEN, {"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        (_QWEN, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (_QWEN, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_refusals_name_the_key(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        _parse(base, **changes)


_DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize("content", [None, "not json", "[1]", pytest.param(_DEEP, id="deep")])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        parse_config(tmp_path)


def test_a_refusal_takes_under_two_seconds_and_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from common.errors import CheckpointError
        from common.model.families import parse_config
        try:
            parse_config(Path(sys.argv[1]))
        except CheckpointError:
            sys.exit(3 if "torch" not in sys.modules else 4)
    """)
    started = time.monotonic()
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 3
    assert time.monotonic() - started < 2
