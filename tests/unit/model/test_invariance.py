"""What a position computes never depends, bit for bit, on how its sequence was cut or on what else was in the batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.model.decoder import MoeDecoder
from tests.unit.model.harness import Harness, chunk, load_decoder, make_checkpoint, solo_run

#: Widths that are no multiple of a vector register, so that every elementwise kernel has a scalar tail.
_ODD = {"hidden_size": 76, "head_dim": 18, "moe_intermediate_size": 37, "intermediate_size": 51, "vocab_size": 299}

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
    "mixtral-windowed": ("mixtral", {"sliding_window": 40}),
    "odd-sizes": ("qwen3_moe", {**_ODD, "num_experts": 7, "num_experts_per_tok": 3, "mlp_only_layers": [2]}),
}


@pytest.fixture(scope="module", params=_MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = _MODELS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", family, {**overrides, "num_hidden_layers": 3})


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def decoder(request: pytest.FixtureRequest, checkpoint: Path) -> MoeDecoder:
    return load_decoder(checkpoint, request.param)


@pytest.fixture(params=[1, 2, 3], ids=["1-thread", "2-threads", "3-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _random_tokens(decoder: MoeDecoder, length: int, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(token) for token in random.integers(0, decoder.config.vocab_size, length)]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33, 255])
def test_a_chunked_prompt_equals_a_whole_one(decoder: MoeDecoder, size: int) -> None:
    tokens = _random_tokens(decoder, 300 if size > 1 else 40, seed=size)
    logits, rows, kv = solo_run(decoder, tokens)
    harness = Harness(decoder, seed=size)
    blocks = harness.blocks_for(len(tokens))
    parts = [
        harness.all_logits([chunk(tokens[start : start + size], start, blocks)])[0]
        for start in range(0, len(tokens), size)
    ]
    assert torch.equal(torch.cat(parts), logits)
    assert np.array_equal(harness.rows(blocks, len(tokens)), rows)
    assert torch.equal(harness.kv(blocks, len(tokens)), kv)


def test_a_random_schedule_of_many_sequences_equals_their_solo_runs(decoder: MoeDecoder, threads: int) -> None:
    random = np.random.default_rng(threads)
    lengths = [1, 16, 60, 130, 255, 256, 270, 520]
    sequences = [_random_tokens(decoder, length, seed=length) for length in lengths]
    expected = [solo_run(decoder, tokens) for tokens in sequences]
    harness = Harness(decoder, seed=threads, num_blocks=256)
    blocks = [harness.blocks_for(length) for length in lengths]
    done = [0] * len(lengths)
    # Long prompts start ahead, so that the last steps are decode steps over one and over three tiles of keys.
    for step in range(40):
        chunks, owners = [], []
        for i, tokens in enumerate(sequences):
            left = len(tokens) - done[i]
            size = max(1, left - 20) if step == i % 3 else int(random.choice([0, 1, 1, 1, 3]))
            if left and size:
                chunks.append(chunk(tokens[done[i] : done[i] + size], done[i], blocks[i]))
                owners.append(i)
        if not chunks:
            break
        for i, part in zip(owners, harness.all_logits(chunks), strict=True):
            assert torch.equal(part, expected[i][0][done[i] : done[i] + len(part)]), f"sequence {i} at {done[i]}"
            done[i] += len(part)
    for i, length in enumerate(lengths):
        assert done[i] > length - 20
        assert np.array_equal(harness.rows(blocks[i], done[i]), expected[i][1][: done[i]])
        assert torch.equal(harness.kv(blocks[i], done[i]), expected[i][2][:, :, : done[i]])


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
    logits = harness.runner.execute(chunks)
    assert logits.dtype == torch.float32
    for row, tokens in zip(logits, sequences, strict=True):
        assert torch.equal(row, solo_run(decoder, tokens)[0][-1])


def test_an_empty_batch_has_no_logits(decoder: MoeDecoder) -> None:
    assert Harness(decoder).runner.execute([]).shape == (0, decoder.config.vocab_size)
