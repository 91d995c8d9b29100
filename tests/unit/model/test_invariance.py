"""What a position computes never depends, bit for bit, on how its sequence was cut or on what else was in the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.model.batch import Chunk
from common.model.decoder import MoeDecoder
from common.model.families import FAMILIES
from tests.unit.model.harness import Harness, SoloRun, chunk, load_decoder, make_checkpoint, solo_run

#: Widths that are no multiple of a vector register, so that every elementwise kernel has a scalar tail.
_ODD = {"hidden_size": 76, "head_dim": 18, "moe_intermediate_size": 37, "intermediate_size": 51, "vocab_size": 299}
_ODD_FUSED = {"hidden_size": 76, "head_dim": 18, "intermediate_size": 37, "vocab_size": 299, "num_key_value_heads": 1}
#: The same for kernels that take two inputs at a time: no multiples of a panel or a register, but even.
_EVEN = {"hidden_size": 76, "head_dim": 18, "moe_intermediate_size": 38, "intermediate_size": 54, "vocab_size": 299}
#: The smallest products per head are within the size up to which other kernels compute.
_ODD_LATENT = {
    "hidden_size": 75,
    "kv_lora_rank": 37,
    "moe_intermediate_size": 37,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "vocab_size": 299,
}

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen3_moe-mixed": ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
    "mixtral-windowed": ("mixtral", {"sliding_window": 40}),
    "odd-sizes": ("qwen3_moe", {**_ODD, "num_experts": 7, "num_experts_per_tok": 3, "mlp_only_layers": [2]}),
    "odd-sizes-even": ("qwen3_moe", {**_EVEN, "num_experts": 7, "num_experts_per_tok": 3, "mlp_only_layers": [2]}),
    "odd-sizes-even-fused": ("gpt_oss", {**_ODD_FUSED, "intermediate_size": 38, "num_local_experts": 7}),
    "odd-sizes-even-latent": (
        "deepseek_v3",
        {**_ODD_LATENT, "hidden_size": 74, "kv_lora_rank": 38, "moe_intermediate_size": 38, "intermediate_size": 54}
        | {"v_head_dim": 6, "q_lora_rank": 30, "n_routed_experts": 9, "n_group": 3},
    ),
    "odd-sizes-fused": ("gpt_oss", {**_ODD_FUSED, "num_local_experts": 7, "num_experts_per_tok": 3}),
    "odd-sizes-shared": (
        "qwen2_moe",
        {**_ODD, "num_experts": 7, "shared_expert_intermediate_size": 29, "sliding_window": 77},
    ),
    "odd-sizes-all-heads": ("olmoe", {"hidden_size": 72, "intermediate_size": 37, "vocab_size": 299, "num_experts": 7}),
    "odd-sizes-groups": ("glm4_moe", {**_ODD, "head_dim": 20, "n_routed_experts": 9, "n_group": 3}),
    "odd-sizes-latent": ("deepseek_v3", {**_ODD_LATENT, "q_lora_rank": 29, "n_routed_experts": 9, "n_group": 3}),
    "one-latent-head": ("deepseek_v2", {**_ODD_LATENT, "num_attention_heads": 1, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=_MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = _MODELS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", family, {**overrides, "num_hidden_layers": 3})


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The fastest here, and what computes where those cannot: odd sizes, other devices, no compiler."""
    name: str = request.param
    return name


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def decoder(request: pytest.FixtureRequest, checkpoint: Path, kernels: str) -> MoeDecoder:
    decoder = load_decoder(checkpoint, request.param, kernels)
    if kernels == "auto" and decoder.kernels.name == "torch":
        pytest.skip("torch is the fastest for this model, and is tested beside")
    return decoder


def _random_tokens(decoder: MoeDecoder, length: int, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(token) for token in random.integers(0, decoder.config.vocab_size, length)]


class _Sequence:
    """A prompt on its way through a harness."""

    def __init__(self, harness: Harness, tokens: list[int]) -> None:
        self._harness = harness
        self._tokens = tokens
        self._blocks = harness.blocks_for(len(tokens))
        self.done = 0

    @property
    def left(self) -> int:
        return len(self._tokens) - self.done

    @property
    def is_done(self) -> bool:
        return self.left == 0

    def next_chunk(self, size: int) -> Chunk:
        start, self.done = self.done, min(self.done + size, len(self._tokens))
        return chunk(self._tokens[start : self.done], start, self._blocks)

    def assert_stored(self, solo: SoloRun) -> None:
        """KV and rows of everything computed so far are those of the solo run."""
        assert np.array_equal(self._harness.rows(self._blocks, self.done), solo.rows[: self.done])
        assert torch.equal(self._harness.kv(self._blocks, self.done), solo.kv[:, :, : self.done])


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33, 255])
def test_a_chunked_prompt_equals_a_whole_one(decoder: MoeDecoder, size: int) -> None:
    tokens = _random_tokens(decoder, 300 if size > 1 else 60, seed=size)
    expected = solo_run(decoder, tokens)
    harness = Harness(decoder, seed=size)
    sequence = _Sequence(harness, tokens)
    while not sequence.is_done:
        logits = harness.runner.execute([sequence.next_chunk(size)]).logits_NV
        assert torch.equal(logits[0], expected.logits[sequence.done - 1])
    sequence.assert_stored(expected)


def test_a_random_schedule_of_many_sequences_equals_their_solo_runs(decoder: MoeDecoder) -> None:
    prompts = [_random_tokens(decoder, length, seed=length) for length in (1, 16, 60, 130, 255, 256, 270, 520)]
    expected = [solo_run(decoder, tokens) for tokens in prompts]
    random = np.random.default_rng(0)
    harness = Harness(decoder, num_blocks=256)
    sequences = [_Sequence(harness, tokens) for tokens in prompts]
    for step in range(24):
        # Each in turn gets a long chunk; the last steps are decode steps over one, two and three tiles of keys.
        sizes = [s.left - 12 if step == i else int(random.choice([0, 1, 1, 1, 3])) for i, s in enumerate(sequences)]
        active = [i for i, size in enumerate(sizes) if size > 0 and not sequences[i].is_done]
        logits = harness.runner.execute([sequences[i].next_chunk(sizes[i]) for i in active]).logits_NV
        for i, row in zip(active, logits, strict=True):
            assert torch.equal(row, expected[i].logits[sequences[i].done - 1]), f"step {step}, sequence {i}"
    for sequence, solo in zip(sequences, expected, strict=True):
        assert sequence.left < 12
        sequence.assert_stored(solo)


# The odd sizes are those that threads split unevenly; there is one for each kind of block.
@pytest.mark.parametrize("checkpoint", [name for name in _MODELS if name.startswith("odd-sizes")], indirect=True)
@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_matter(decoder: MoeDecoder, threads: int) -> None:
    tokens = _random_tokens(decoder, 270, seed=threads)
    expected = solo_run(decoder, tokens)
    torch.set_num_threads(threads)
    harness = Harness(decoder)
    sequence = _Sequence(harness, tokens)
    for size in (200, 1, 68, 1):
        logits = harness.runner.execute([sequence.next_chunk(size)]).logits_NV
        assert torch.equal(logits[0], expected.logits[sequence.done - 1])
    sequence.assert_stored(expected)


def test_rows_are_stored_only_for_chunks_that_want_them(decoder: MoeDecoder) -> None:
    tokens = _random_tokens(decoder, 20, seed=0)
    harness = Harness(decoder)
    wanting, other = harness.blocks_for(20), harness.blocks_for(20)
    harness.runner.execute([chunk(tokens, 0, other, wants_rows=False), chunk(tokens, 0, wanting)])
    assert harness.rows(wanting, 20).shape == (20, 3, decoder.config.top_k)
    slots = np.asarray(other[0]) * 16 + np.arange(16)
    assert not harness.store._row_written[slots].any()


def test_logits_come_in_the_order_of_the_chunks_that_want_them(decoder: MoeDecoder) -> None:
    sequences = [_random_tokens(decoder, length, seed=length) for length in (30, 1, 50)]
    harness = Harness(decoder)
    chunks = [chunk(tokens, 0, harness.blocks_for(len(tokens))) for tokens in sequences]
    logits = harness.runner.execute(chunks).logits_NV
    assert logits.dtype == torch.float32
    for row, tokens in zip(logits, sequences, strict=True):
        assert torch.equal(row, solo_run(decoder, tokens).logits[-1])


def test_an_empty_batch_has_no_logits(decoder: MoeDecoder) -> None:
    assert Harness(decoder).runner.execute([]).logits_NV.shape == (0, decoder.config.vocab_size)
