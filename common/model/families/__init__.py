"""The supported MoE families, one module each. Imports no torch.

Adding one that computes with what the decoder has is a short module here: see docs/add-a-model.md.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.model.config import ModelConfig, read_json
from common.model.config_reader import ConfigReader
from common.model.families import deepseek, glm4_moe, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe
from common.model.families.family import Family
from common.model.families.routing_check import check_routing
from common.model.quantized.config import read_quantization

_ALL = (
    qwen3_moe.FAMILY,
    mixtral.FAMILY,
    qwen2_moe.FAMILY,
    olmoe.FAMILY,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
    deepseek.V2,
    deepseek.V3,
)

#: Every supported family by its `model_type`.
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}

#: In all layers together; what a checkpoint must hold is listed by name before its files are compared with it.
_MOST_EXPERTS = 2**18

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
    """As `parse_config`, from parsed JSON; `source` is the path of config.json, for complaints."""
    reader = ConfigReader(values, source)
    family = _find_family(reader)
    _refuse_unsupported(reader)
    _refuse_dense(reader, family)
    config = family.read(reader)
    _check_sizes(config, reader)
    generation_reader = ConfigReader(generation, str(Path(source).with_name("generation_config.json")))
    eos_token_ids = _read_eos(reader, config) | _read_eos(generation_reader, config)
    quantization = read_quantization(reader, fused_experts=family.names.experts == "fused")
    return dataclasses.replace(config, eos_token_ids=eos_token_ids, quantization=quantization)


def _read_eos(reader: ConfigReader, config: ModelConfig) -> frozenset[int]:
    """The end-of-sequence ids that one file names."""
    token_ids = reader.integers("eos_token_id")
    for token_id in token_ids:
        if token_id >= config.vocab_size:
            reader.fail("eos_token_id", token_id, f"below vocab_size, {config.vocab_size}")
    return frozenset(token_ids)


def _find_family(reader: ConfigReader) -> Family:
    architectures = reader.strings("architectures")
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


def _refuse_dense(reader: ConfigReader, family: Family) -> None:
    if reader.raw(*family.num_experts_keys) in (None, 0):
        raise CheckpointError(
            f"{reader.source}: {family.num_experts_keys[0]} is missing or 0, so this is a dense model, which has no "
            f"routing; supported mixture-of-experts models: {_SUPPORTED}"
        )


def _check_sizes(config: ModelConfig, reader: ConfigReader) -> None:
    if not config.moe_layers:
        raise CheckpointError(
            f"{reader.source}: its settings leave no MoE layer, so this is a dense model, which has no routing; "
            f"supported mixture-of-experts models: {_SUPPORTED}"
        )
    if len(config.moe_layers) * config.num_experts > _MOST_EXPERTS:
        key = next(key for key in FAMILIES[config.family].num_experts_keys if reader.raw(key) is not None)
        wanted = f"such that all {len(config.moe_layers)} MoE layers together have at most {_MOST_EXPERTS}"
        reader.fail(key, config.num_experts, wanted)
    if config.top_k > config.num_experts:
        reader.fail("num_experts_per_tok", config.top_k, f"at most the number of experts, {config.num_experts}")
    _check_groups(config, reader)
    check_routing(config, reader)


def _check_groups(config: ModelConfig, reader: ConfigReader) -> None:
    """Groups of experts have one size, and enough of them are kept to choose from."""
    router = config.router
    if config.num_experts % router.num_groups:
        reader.fail("n_group", router.num_groups, f"a divisor of the {config.num_experts} experts")
    size = config.num_experts // router.num_groups
    if router.num_groups_kept > router.num_groups:
        reader.fail("topk_group", router.num_groups_kept, f"at most n_group, {router.num_groups}")
    if size < router.num_group_scores:
        reader.fail("n_group", router.num_groups, f"such that a group has {router.num_group_scores} experts")
    if router.num_groups_kept * size < config.top_k:
        reader.fail("topk_group", router.num_groups_kept, f"enough groups of {size} to choose {config.top_k} experts")
