"""The supported MoE families: how each spells its config.json and names its tensors. Imports no torch.

Adding a family that computes the same way is one entry in `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.model.config import ModelConfig, read_json
from common.model.config_reader import ConfigReader
from common.model.rope_config import read_rope


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family decides by rules of its own rather than by a plainly named key."""

    norm_topk_prob: bool
    attention_bias: bool
    dense_size: int
    moe_layers: frozenset[int]
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Defaults are those that transformers assumes when a key is absent."""

    model_type: str
    architecture: str
    qk_norm: bool
    default_rope_theta: float
    default_rms_norm_eps: float
    #: Spellings of the number of experts; the first is the one that hub checkpoints use.
    num_experts_keys: tuple[str, ...]
    expert_size_key: str
    #: Tensor names: the MoE block inside a layer, and gate, up and down projection inside an expert.
    moe_block: str
    expert_projections: tuple[str, str, str]
    read_traits: Callable[[ConfigReader, int], Traits]


def _qwen3_moe_traits(reader: ConfigReader, num_layers: int) -> Traits:
    step = reader.count("decoder_sparse_step", default=1)
    dense = set(reader.integers("mlp_only_layers"))
    # As in transformers 5 the window, once switched on, holds in every layer; `max_window_layers` is not read.
    windowed = reader.flag("use_sliding_window", default=False)
    return Traits(
        norm_topk_prob=reader.flag("norm_topk_prob", default=False),
        attention_bias=reader.flag("attention_bias", default=False),
        dense_size=reader.count("intermediate_size", default=6144),
        moe_layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        sliding_window=reader.count("sliding_window", default=4096) if windowed else None,
    )


def _mixtral_traits(reader: ConfigReader, num_layers: int) -> Traits:
    windowed = reader.raw("sliding_window") is not None
    return Traits(
        norm_topk_prob=True,
        attention_bias=False,
        dense_size=reader.count("intermediate_size"),
        moe_layers=frozenset(range(num_layers)),
        sliding_window=reader.count("sliding_window") if windowed else None,
    )


_ALL = (
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        default_rope_theta=10_000.0,
        default_rms_norm_eps=1e-6,
        num_experts_keys=("num_experts", "num_local_experts"),
        expert_size_key="moe_intermediate_size",
        moe_block="mlp",
        expert_projections=("gate_proj", "up_proj", "down_proj"),
        read_traits=_qwen3_moe_traits,
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        qk_norm=False,
        default_rope_theta=1_000_000.0,
        default_rms_norm_eps=1e-5,
        num_experts_keys=("num_local_experts", "num_experts"),
        expert_size_key="intermediate_size",
        moe_block="block_sparse_moe",
        expert_projections=("w1", "w3", "w2"),
        read_traits=_mixtral_traits,
    ),
)

#: Every supported family by its `model_type`.
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}

_SUPPORTED = ", ".join(f"{family.model_type} ({family.architecture})" for family in _ALL)


def parse_config(path: Path) -> ModelConfig:
    """Reads config.json and, where there is one, generation_config.json of a checkpoint directory.

    Raises:
        CheckpointError: a file or key is missing or wrong, or the model is not a supported MoE model.
    """
    generation = path / "generation_config.json"
    return config_from_json(
        read_json(path / "config.json"),
        read_json(generation) if generation.exists() else {},
        source=str(path / "config.json"),
    )


def config_from_json(values: Mapping[str, Any], generation: Mapping[str, Any], *, source: str) -> ModelConfig:
    """As `parse_config`, from parsed JSON; `source` names the file in complaints."""
    reader = ConfigReader(values, source)
    family = _find_family(reader)
    _refuse_unsupported(reader)
    num_layers = reader.count("num_hidden_layers")
    num_heads = reader.count("num_attention_heads")
    hidden_size = reader.count("hidden_size")
    traits = family.read_traits(reader, num_layers)
    generation_reader = ConfigReader(generation, "generation_config.json")
    config = ModelConfig(
        family=family.model_type,
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=reader.count("num_key_value_heads", default=num_heads),
        head_dim=reader.count("head_dim", default=max(hidden_size // num_heads, 1)),
        num_experts=_read_num_experts(reader, family),
        top_k=reader.count("num_experts_per_tok"),
        expert_size=reader.count(family.expert_size_key),
        dense_size=traits.dense_size,
        moe_layers=traits.moe_layers,
        norm_topk_prob=traits.norm_topk_prob,
        qk_norm=family.qk_norm,
        attention_bias=traits.attention_bias,
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        rms_norm_eps=reader.number("rms_norm_eps", default=family.default_rms_norm_eps),
        max_position_embeddings=reader.count("max_position_embeddings"),
        rope=read_rope(reader, family.default_rope_theta),
        sliding_windows=(traits.sliding_window,) * num_layers,
        dtype=reader.text("dtype", "torch_dtype", default="float32").removeprefix("torch."),
        eos_token_ids=frozenset(reader.integers("eos_token_id") + generation_reader.integers("eos_token_id")),
    )
    _check_sizes(config, reader)
    return config


def _find_family(reader: ConfigReader) -> Family:
    architectures = reader.raw("architectures")
    model_type = reader.raw("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or (architectures and family.architecture not in architectures):
        raise CheckpointError(
            f"{reader.source}: model_type {model_type!r} with architectures {architectures!r} is not supported; "
            f"supported mixture-of-experts models: {_SUPPORTED}"
        )
    return family


def _refuse_unsupported(reader: ConfigReader) -> None:
    """Refuses settings that would change the result and that nothing here computes."""
    activation = reader.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        reader.fail("hidden_act", activation, "'silu'")
    if reader.raw("quantization_config") is not None:
        raise CheckpointError(
            f"{reader.source}: quantization_config is set; only float32 and bfloat16 weights are supported, "
            "convert the checkpoint first"
        )


def _read_num_experts(reader: ConfigReader, family: Family) -> int:
    if reader.raw(*family.num_experts_keys) in (None, 0):
        raise CheckpointError(
            f"{reader.source}: {family.num_experts_keys[0]} is missing or 0, so this is a dense model, which has no "
            f"routing; supported mixture-of-experts models: {_SUPPORTED}"
        )
    return reader.count(*family.num_experts_keys)


def _check_sizes(config: ModelConfig, reader: ConfigReader) -> None:
    if not config.moe_layers:
        raise CheckpointError(
            f"{reader.source}: decoder_sparse_step and mlp_only_layers leave no MoE layer, so this is a dense model, "
            f"which has no routing; supported mixture-of-experts models: {_SUPPORTED}"
        )
    if config.top_k > config.num_experts:
        reader.fail("num_experts_per_tok", config.top_k, f"at most the number of experts, {config.num_experts}")
    if config.num_heads % config.num_kv_heads:
        reader.fail("num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads} attention heads")
    if config.head_dim % 2:
        reader.fail("head_dim", config.head_dim, "even, because rotary embedding pairs dimensions")
    beyond = [token for token in config.eos_token_ids if token >= config.vocab_size]
    if beyond:
        reader.fail("eos_token_id", beyond[0], f"below vocab_size, {config.vocab_size}")
