"""Nothing missing, nothing left over, nothing of the wrong shape; and the fingerprint of what was loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from common.model.families import parse_config
from common.model.feed_forward import MoeFeedForward
from common.model.kernels.reference import TORCH
from common.model.loader import LoadedModel, build_decoder, load_model
from common.model.quantized.config import MXFP4, Quantization, block_fp8
from common.model.quantized.files import open_checkpoint
from common.model.router import TorchRouter
from common.model.synthesize import synthesize
from common.model.tensor_source import TensorSource
from common.model.tensors import checkpoint_tensors
from tests.unit.model.harness import CPU, load_decoder, make_checkpoint, solo_run

_SMALL = {"num_hidden_layers": 2, "num_experts": 4}
_UP = "model.layers.1.mlp.experts.3.up_proj.weight"

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "m", "qwen3_moe", _SMALL)


def _load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, parse_config(path), dtype, CPU, progress=False)


def _edit(path: Path, change: Callable[[Tensors], object]) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def _set_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    _edit(checkpoint, lambda tensors: tensors.pop(_UP))
    with pytest.raises(CheckpointError, match=rf"{_UP} is missing"):
        _load(checkpoint)


def test_a_leftover_tensor_is_named(checkpoint: Path) -> None:
    _edit(checkpoint, lambda tensors: tensors.update({"model.layers.2.mlp.gate.weight": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.gate\.weight is unknown"):
        _load(checkpoint)


def test_many_leftovers_are_counted(checkpoint: Path) -> None:
    _set_config(checkpoint, num_experts=3)
    with pytest.raises(CheckpointError, match=r"and 3 more are unknown"):
        _load(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    _edit(checkpoint, lambda tensors: tensors.update({_UP: torch.zeros(32, 63)}))
    with pytest.raises(CheckpointError, match=rf"{_UP} has shape \[32, 63\].*\[32, 64\]"):
        _load(checkpoint)


def test_saved_rotary_frequencies_are_ignored(checkpoint: Path) -> None:
    before = _load(checkpoint).fingerprint
    _edit(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert _load(checkpoint).fingerprint == before


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\xff" * 64])
def test_a_broken_file_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        _load(checkpoint)


def test_a_directory_without_weights_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        _load(checkpoint)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    synthesize("qwen3_moe", "tiny", 0, _SMALL, tmp_path / "m", shard_bytes=100_000)
    shard = sorted((tmp_path / "m").glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} missing"):
        _load(tmp_path / "m")


@pytest.mark.parametrize("name", ["a" * 5000, "\ud800", "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"missing|too long") as caught:
        _load(checkpoint)
    assert caught.value.message.encode()


def test_shards_that_repeat_a_tensor_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    save_file({_UP: torch.zeros(32, 64)}, checkpoint / "b.safetensors")
    with pytest.raises(CheckpointError, match=rf"b\.safetensors repeats tensor {_UP}"):
        _load(checkpoint)


def test_the_fingerprint_does_not_depend_on_shards_or_dtype(checkpoint: Path, tmp_path: Path) -> None:
    expected = _load(checkpoint).fingerprint
    synthesize("qwen3_moe", "tiny", 0, _SMALL, tmp_path / "indexed", shard_bytes=100_000)
    synthesize("qwen3_moe", "tiny", 0, _SMALL, tmp_path / "unindexed", shard_bytes=100_000)
    (tmp_path / "unindexed" / "model.safetensors.index.json").unlink()
    assert len(expected) == 32
    assert _load(checkpoint, torch.bfloat16).fingerprint == expected
    assert _load(tmp_path / "indexed").fingerprint == expected
    assert _load(tmp_path / "unindexed").fingerprint == expected


def test_the_fingerprint_covers_weights_and_configuration(checkpoint: Path) -> None:
    fingerprints = {_load(checkpoint).fingerprint}
    _set_config(checkpoint, rms_norm_eps=1e-5)
    fingerprints.add(_load(checkpoint).fingerprint)
    _edit(checkpoint, lambda tensors: tensors[_UP][31, 63].neg_())
    fingerprints.add(_load(checkpoint).fingerprint)
    assert len(fingerprints) == 3


def test_a_tied_head_may_be_repeated_but_not_contradicted(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "qwen3_moe", {**_SMALL, "tie_word_embeddings": True})
    expected = solo_run(load_decoder(path), [5, 6, 7]).logits
    _edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(solo_run(load_decoder(path), [5, 6, 7]).logits, expected)
    _edit(path, lambda t: t["lm_head.weight"].neg_())
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true"):
        _load(path)


def test_a_quantised_checkpoint_computes_like_its_dequantised_copy(tmp_path: Path) -> None:
    quantization = block_fp8(16, 24)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    synthesize("qwen3_moe", "tiny", 0, _SMALL, packed, quantization=quantization)
    synthesize("qwen3_moe", "tiny", 0, _SMALL, plain)
    with open_checkpoint(packed, quantization) as files:
        save_file({name: files.read(name).float() for name in files.names()}, plain / "model.safetensors")
    results = [solo_run(_load(path).decoder, range(40)) for path in (packed, plain)]
    assert torch.equal(results[0].logits, results[1].logits)
    assert not torch.equal(results[0].logits, solo_run(load_decoder(_unquantized(tmp_path)), range(40)).logits)


def _unquantized(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "unquantized", "qwen3_moe", _SMALL)


@pytest.mark.parametrize(
    ("family", "quantization"), [("glm4_moe", None), ("deepseek_v3", block_fp8()), ("gpt_oss", MXFP4)]
)
def test_progress_goes_to_the_end_although_some_tensors_are_never_read(
    tmp_path: Path, family: str, quantization: Quantization | None
) -> None:
    """Tensors of layers that predict further tokens, a rotary buffer, scales and the headers of the files."""
    path = tmp_path / "m"
    synthesize(family, "tiny", 0, {"num_hidden_layers": 2}, path, quantization=quantization)
    if family != "gpt_oss":
        _set_config(path, num_nextn_predict_layers=1)
        _edit(path, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}))
    _edit(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    config, counted = parse_config(path), list[int]()
    with open_checkpoint(path, config.quantization) as files:
        build_decoder(TensorSource(files, torch.float32, CPU, counted.append), config, TORCH, None)
        assert sum(counted) == files.num_bytes(checkpoint_tensors(config)) > 0


def test_a_quantised_tensor_counts_as_the_values_that_it_stands_for(tmp_path: Path) -> None:
    quantization, packed, plain = block_fp8(16, 24), tmp_path / "packed", tmp_path / "plain"
    synthesize("qwen3_moe", "tiny", 0, _SMALL, packed, quantization=quantization)
    plain.mkdir()
    with open_checkpoint(packed, quantization) as files:
        save_file({name: files.read(name) for name in files.names()}, plain / "model.safetensors")
    config, fingerprints = parse_config(packed), set[str]()
    for path, kind in ((packed, quantization), (plain, None)):
        with open_checkpoint(path, kind) as files:
            source = TensorSource(files, torch.bfloat16, CPU, lambda count: None)
            build_decoder(source, config, TORCH, None)
        fingerprints.add(source.fingerprint(config, ""))
    assert len(fingerprints) == 1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_correction_is_fp32_whatever_it_is_stored_and_computed_in(tmp_path: Path, stored: torch.dtype) -> None:
    path = make_checkpoint(tmp_path / "m", "glm4_moe", {"num_hidden_layers": 2})
    drawn = torch.linspace(-0.1, 0.1, 8).to(stored)
    _edit(path, lambda tensors: tensors.update({"model.layers.1.mlp.gate.e_score_correction_bias": drawn}))
    config = parse_config(path)
    loaded = load_model(path, config, torch.bfloat16, CPU, progress=False, kernels=TORCH)
    feed_forward = loaded.decoder._layers[1].feed_forward
    assert isinstance(feed_forward, MoeFeedForward)
    assert isinstance(feed_forward.router, TorchRouter)
    correction = feed_forward.router.correction_E
    assert correction is not None
    assert correction.dtype == torch.float32
    assert torch.equal(correction, drawn.float())
