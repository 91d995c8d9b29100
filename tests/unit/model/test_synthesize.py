"""Synthetic checkpoints: the same arguments give the same bytes, and wrong ones are refused in words."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.errors import ConfigError
from common.model.families import FAMILIES, config_from_json, parse_config
from common.model.presets import synthetic_config
from common.model.synthesize import synthesize
from common.model.tensors import checkpoint_tensors
from tests.unit.model.harness import load_decoder, make_checkpoint


def _bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, family: str) -> None:
    first, again = (
        make_checkpoint(tmp_path / "a", family, {}, seed=7),
        make_checkpoint(tmp_path / "b", family, {}, seed=7),
    )
    other = make_checkpoint(tmp_path / "c", family, {}, seed=8)
    assert _bytes_of(first) == _bytes_of(again)
    assert [name for name, data in _bytes_of(other).items() if data != _bytes_of(first)[name]] == ["model.safetensors"]


def test_the_files_are_those_of_a_hub_checkpoint(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "qwen3_moe", {})
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(_bytes_of(path)) == names
    config = json.loads((path / "config.json").read_text())
    assert {"num_experts": 8, "torch_dtype": "bfloat16", "rope_theta": 10_000.0}.items() <= config.items()
    assert parse_config(path).eos_token_ids == {2}


def test_overrides_reach_the_weights(tmp_path: Path) -> None:
    overrides = {"num_experts": 257, "num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 128}
    config = load_decoder(make_checkpoint(tmp_path / "m", "mixtral", overrides)).config
    assert (config.num_experts, config.num_layers, config.vocab_size) == (257, 2, 300)
    assert config.max_position_embeddings == 128
    assert config.routing.dtype == np.uint16


def test_the_bench_preset_has_the_published_size() -> None:
    config = config_from_json(synthetic_config("qwen3_moe", "bench", {}), {}, source="config.json")
    shapes = checkpoint_tensors(config)
    assert round(sum(map(math.prod, shapes.values())) / 1e6) == 701
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (12, 1024, 16, 4)
    assert (config.kv_dim, config.num_experts, config.top_k, config.experts.size) == (64, 32, 4, 512)
    assert (config.vocab_size, config.dtype) == (32_000, "bfloat16")


@pytest.mark.parametrize("vocab_size", [260, 300, 512])
def test_the_tokenizer_encodes_any_text_within_the_vocabulary(tmp_path: Path, vocab_size: int) -> None:
    path = make_checkpoint(tmp_path / "m", "qwen3_moe", {"num_hidden_layers": 1, "vocab_size": vocab_size})
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= vocab_size
    for text in ("Hello, world!", "é 한 👩‍👩‍👧", "\x00\x7f\n\t  x", "Ω≈ç√∫"):
        ids = tokenizer.encode(text).ids
        assert max(ids) < vocab_size
        assert tokenizer.decode(ids) == text
    turn = tokenizer.encode("<|im_start|>user<|im_end|>").ids
    assert (turn[0], turn[-1]) == (1, 2)
    assert [tokenizer.id_to_token(i) for i in range(4)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]


@pytest.mark.parametrize(
    ("family", "preset", "seed", "overrides", "words"),
    [
        ("llama", "tiny", 0, {}, "unknown family 'llama'.*qwen3_moe, mixtral"),
        ("mixtral", "huge", 0, {}, "unknown preset 'huge'.*tiny, bench"),
        ("mixtral", "tiny", -1, {}, "seed must not be negative"),
        ("mixtral", "tiny", 0, {"num_expertz": 3}, "unknown key 'num_expertz'.*num_local_experts"),
        ("mixtral", "tiny", 0, {"mlp_only_layers": [1]}, "unknown key 'mlp_only_layers' for mixtral"),
        ("mixtral", "tiny", 0, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ("qwen3_moe", "tiny", 0, {"vocab_size": 259}, "vocab_size is 259.*260"),
        ("qwen3_moe", "tiny", 0, {"torch_dtype": "float16"}, "torch_dtype is 'float16'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, family: str, preset: str, seed: int, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        synthesize(family, preset, seed, overrides, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_an_occupied_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    with pytest.raises(ConfigError, match="not empty"):
        synthesize("mixtral", "tiny", 0, {}, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]
