"""Sizes of synthetic checkpoints, as config.json values in the spelling that hub checkpoints use. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from common.errors import ConfigError
from common.model.families import FAMILIES
from common.model.families.family import Family
from common.model.tokenizer_training import BOS_ID, EOS_ID, PAD_ID


@dataclass(frozen=True, slots=True)
class Preset:
    """One size of model; the same for every family."""

    #: Values of keys that every family spells alike.
    sizes: Mapping[str, Any]
    num_experts: int
    expert_size: int
    #: Width of dense layers, in families that have them.
    dense_size: int
    #: Largest safetensors file.
    shard_bytes: int


_TINY = Preset(
    sizes={
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
    },
    num_experts=8,
    expert_size=32,
    dense_size=128,
    shard_bytes=400_000_000,
)

_BENCH = Preset(
    sizes={
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 8192,
    },
    num_experts=32,
    expert_size=512,
    dense_size=2048,
    shard_bytes=400_000_000,
)

#: "tiny" runs in milliseconds; "bench" has 701 M parameters, 140 M of them active per token.
PRESETS: Mapping[str, Preset] = MappingProxyType({"tiny": _TINY, "bench": _BENCH})

_COMMON_KEYS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def synthetic_config(family_name: str, preset_name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a synthetic checkpoint.

    Raises:
        ConfigError: there is no such family or preset, or an override names a key that this config does not have.
    """
    if family_name not in FAMILIES:
        raise ConfigError(f"unknown family {family_name!r}; choose one of {', '.join(FAMILIES)}", param="family")
    if preset_name not in PRESETS:
        raise ConfigError(f"unknown preset {preset_name!r}; choose one of {', '.join(PRESETS)}", param="preset")
    family = FAMILIES[family_name]
    config = _preset_config(family, PRESETS[preset_name])
    for key, value in overrides.items():
        name = family.num_experts_keys[0] if key in family.num_experts_keys else key
        if name not in config:
            raise ConfigError(f"unknown key {key!r} for {family_name}; it has {', '.join(sorted(config))}", param="set")
        config[name] = value
    return config


def _preset_config(family: Family, preset: Preset) -> dict[str, Any]:
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **_COMMON_KEYS,
        **preset.sizes,
        "intermediate_size": preset.dense_size,
        # After the dense width, because in families without dense layers it is the same key.
        family.expert_size_key: preset.expert_size,
        family.num_experts_keys[0]: preset.num_experts,
    }
    values = common | dict(family.synthetic(common))
    return {key: value for key, value in values.items() if key not in family.synthetic_without}
