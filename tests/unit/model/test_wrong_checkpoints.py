"""Every family refuses a checkpoint that is not whole, not its own, or that asks for what nothing here computes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from common.model.families import FAMILIES, config_from_json, parse_config
from common.model.loader import load_model
from common.model.presets import synthetic_config
from common.model.quantized.config import MXFP4
from tests.unit.model.harness import CPU, make_checkpoint

Tensors = dict[str, torch.Tensor]

#: Families whose published checkpoints hold layers that predict further tokens; synthetic ones do not.
_WITH_FURTHER_LAYERS = [name for name in FAMILIES if "num_nextn_predict_layers" in synthetic_config(name, "tiny", {})]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("family") / request.param, request.param, {"num_hidden_layers": 3})


def _tensors(checkpoint: Path) -> Tensors:
    return {name: tensor.clone() for name, tensor in load_file(checkpoint / "model.safetensors").items()}


def _names(tensors: Tensors) -> list[str]:
    """One of each kind: what is outside layers, and what is in one dense and one MoE layer, with one expert."""
    return [name for name in tensors if ".layers.1." not in name and (".experts." not in name or ".experts.2." in name)]


def _load(path: Path, tensors: Tensors, config: Mapping[str, Any]) -> str:
    """The fingerprint of a checkpoint of these tensors."""
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return load_model(path, parse_config(path), torch.float32, CPU, progress=False).fingerprint


def _complaint(path: Path, tensors: Tensors, config: Mapping[str, Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        _load(path, tensors, config)
    return error.value.message


def _config(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return values | changes


def test_each_tensor_is_needed(checkpoint: Path, tmp_path: Path) -> None:
    tensors = _tensors(checkpoint)
    for name in _names(tensors):
        left = {other: tensor for other, tensor in tensors.items() if other != name}
        assert f"tensor {name} is missing" in _complaint(tmp_path, left, _config(checkpoint))


def test_each_tensor_has_one_shape(checkpoint: Path, tmp_path: Path) -> None:
    tensors = _tensors(checkpoint)
    for name in _names(tensors):
        longer = torch.cat([tensors[name], tensors[name][:1]])
        complaint = _complaint(tmp_path, tensors | {name: longer}, _config(checkpoint))
        assert f"{name} has shape {list(longer.shape)}" in complaint
        assert str(list(tensors[name].shape)) in complaint


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.999.gate_proj.weight",
        "model.layers.2.self_attn.q_proj.weight_scale",
        "model.layers.2.self_attn.rotary.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.30.input_layernorm.weight",
        "visual.patch_embed.weight",
    ],
)
def test_a_tensor_that_nobody_reads_is_an_error(checkpoint: Path, tmp_path: Path, name: str) -> None:
    tensors = _tensors(checkpoint) | {name: torch.zeros(4)}
    assert f"tensor {name} is unknown" in _complaint(tmp_path, tensors, _config(checkpoint))


@pytest.mark.parametrize("checkpoint", _WITH_FURTHER_LAYERS, indirect=True)
def test_only_declared_layers_that_predict_further_tokens_are_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    tensors, config = _tensors(checkpoint), _config(checkpoint, num_nextn_predict_layers=2)
    further = {f"model.layers.{layer}.eh_proj.weight": torch.zeros(4) for layer in (3, 4)}
    assert _load(tmp_path, tensors | further, config) == _load(tmp_path, tensors, config)
    config["num_nextn_predict_layers"] = 1
    assert "model.layers.4.eh_proj.weight is unknown" in _complaint(tmp_path, tensors | further, config)


#: Values that change which experts are chosen, or what else is computed, and that no family knows.
_UNKNOWN_TO_ALL: dict[str, list[object]] = {
    "hidden_act": ["gelu", 1],
    "scoring_func": ["tanh", 1],
    "topk_method": ["best", 1],
    "layer_types": [["chunked_attention"] * 4, ["full_attention"], "full_attention", 1],
    "tie_word_embeddings": ["no", 0],
    "num_experts_per_tok": [0, 9, "2", True],
    "rms_norm_eps": [0, "1e-6"],
}

#: Wrong values of keys that only some families have.
_UNKNOWN_TO_SOME: dict[str, list[object]] = {
    "attention_bias": ["true", 1],
    "clip_qkv": [0, "8"],
    "first_k_dense_replace": [-1, 1.0],
    "kv_lora_rank": [0],
    "mlp_only_layers": [[-1], "1"],
    "n_group": [3, 0],
    "n_shared_experts": [-1, 0.5],
    "norm_topk_prob": ["yes", 1],
    "partial_rotary_factor": [1.5, 0],
    "qkv_bias": ["true"],
    "routed_scaling_factor": [0, "2.5"],
    "shared_expert_intermediate_size": [0],
    "swiglu_limit": [0, "7"],
    "topk_group": [5, 0],
    "use_qk_norm": [1],
    "use_sliding_window": [1],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_ways_of_computing_are_refused_by_name(family: str) -> None:
    config = synthetic_config(family, "tiny", {})
    wrong = _UNKNOWN_TO_ALL | {key: values for key, values in _UNKNOWN_TO_SOME.items() if key in config}
    for key, values in wrong.items():
        for value in values:
            with pytest.raises(CheckpointError, match=rf"config\.json: {key} is {re.escape(repr(value))}, but must be"):
                config_from_json(config | {key: value}, {}, source="config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_only_experts_in_one_tensor_can_be_mxfp4(family: str) -> None:
    config = synthetic_config(family, "tiny", {}) | {"quantization_config": {"quant_method": "mxfp4"}}
    if family == "gpt_oss":
        assert config_from_json(config, {}, source="config.json").quantization == MXFP4
    else:
        with pytest.raises(CheckpointError, match=r"config\.json: quantization_config: quant_method is 'mxfp4'"):
            config_from_json(config, {}, source="config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_that_config_json_contradicts_is_refused(family: str) -> None:
    """Experts would be chosen otherwise than in training, and nothing else would show it."""
    config = synthetic_config(family, "tiny", {})
    sigmoid = config_from_json(config, {}, source="config.json").router.scoring == "sigmoid"
    other = {"scoring_func": "softmax" if sigmoid else "sigmoid", "topk_method": "greedy" if sigmoid else "noaux_tc"}
    for key, value in other.items():
        with pytest.raises(CheckpointError, match=f"{key} is '{value}'"):
            config_from_json(config | {key: value}, {}, source="config.json")
