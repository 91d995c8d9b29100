"""Keys that a config.json leaves out, or has as null, mean what they do in transformers, or are refused as missing."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.families import FAMILIES, config_from_json, parse_config
from common.model.presets import synthetic_config

#: transformers has defaults for these too, but those are the sizes of one certain model.
_REQUIRED = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_local_experts",
    "shared_expert_intermediate_size",
    "vocab_size",
}

#: Without it no token ends a sequence; transformers has that of one certain tokenizer.
_OTHERWISE = {"eos_token_id"}


def _values(family: str) -> dict[str, Any]:
    """With as many heads as go with the family's default for `num_key_value_heads`."""
    heads = {"num_attention_heads": 128, "hidden_size": 2048}
    return synthetic_config(family, "tiny", heads | ({"num_key_value_heads": 128} if "deepseek" in family else {}))


def _ours(values: dict[str, Any]) -> ModelConfig | str:
    """What is read, or the complaint."""
    try:
        return config_from_json(values, {}, source="config.json")
    except CheckpointError as error:
        return error.message


def _theirs(values: dict[str, Any], path: Path) -> ModelConfig | None:
    """What transformers makes of it, as it saves it; None if it cannot be a model of that."""
    (path / "config.json").write_text(json.dumps(values))
    try:
        AutoConfig.from_pretrained(path).save_pretrained(path / "saved")
        return parse_config(path / "saved")
    except (CheckpointError, StrictDataclassError, ValueError, TypeError, AttributeError):
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_left_out_means_what_it_does_in_transformers(family: str, tmp_path: Path) -> None:
    values, wrong = _values(family), []
    for key in values.keys() - _OTHERWISE:
        without = {name: value for name, value in values.items() if name != key}
        ours = _ours(without)
        if isinstance(ours, str) and key in _REQUIRED:
            continue
        theirs = _theirs(without, tmp_path)
        if ours != theirs and not (isinstance(ours, str) and theirs is None):
            wrong.append((key, ours, theirs))
    assert wrong == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_null_means_what_it_does_in_transformers(family: str, tmp_path: Path) -> None:
    values, wrong = _values(family), []
    for key in values.keys() - _OTHERWISE:
        ours, theirs = _ours(values | {key: None}), _theirs(values | {key: None}, tmp_path)
        # What transformers makes no model of may have a default here.
        if theirs is not None and ours != theirs and not (isinstance(ours, str) and key in _REQUIRED):
            wrong.append((key, ours, theirs))
    assert wrong == []
