"""Mixtral (Jiang et al., arXiv 2401.04088)."""

from common.model.config import ExpertsConfig, ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader
from common.model.families.family import Family, TensorNames, read_grouped_attention, read_model

_NUM_EXPERTS = ("num_local_experts", "num_experts")


def _read(reader: ConfigReader) -> ModelConfig:
    num_layers = reader.count("num_hidden_layers")
    window = reader.optional_count("sliding_window", default=None)
    return read_model(
        reader,
        "mixtral",
        attention=read_grouped_attention(reader, default_num_kv_heads=8),
        experts=ExpertsConfig(reader.count(*_NUM_EXPERTS), reader.count("intermediate_size")),
        router=RouterConfig(normalize=True),
        moe_layers=frozenset(range(num_layers)),
        dense_size=reader.count("intermediate_size"),
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-5,
        sliding_windows=(window,) * num_layers,
    )


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    _read,
    _NUM_EXPERTS,
    TensorNames(block="block_sparse_moe", projections=("w1", "w3", "w2")),
    expert_size_key="intermediate_size",
)
