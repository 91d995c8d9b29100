"""Scores of prompt tokens: against NumPy, and the same bits however the prompt is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.batch import Chunk
from common.model.decoder import MoeDecoder
from common.model.scores import score, top_ids
from common.prompt_logprobs import ENTRY, PromptLogprobs
from tests.unit.model.harness import Harness, load_decoder, make_checkpoint, solo_run

TOP = 5


def expected_entry(logits_V: np.ndarray[Any, np.dtype[np.float32]], token_id: int) -> tuple[int, float, int]:
    shifted = logits_V.astype(np.float64) - logits_V.max()
    logprob = shifted[token_id] - np.log(np.exp(shifted).sum())
    return token_id, float(logprob), 1 + int((logits_V > logits_V[token_id]).sum())


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-4, 4), min_size=6, max_size=6), min_size=1, max_size=5),
    num_top=st.integers(0, 6),
    data=st.data(),
)
def test_scores_equal_the_plain_computation(rows: list[list[int]], num_top: int, data: st.DataObject) -> None:
    """Coarse logits, so that ties are common."""
    logits_NV = np.array(rows, np.float32)
    targets = data.draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
    got = score(torch.from_numpy(logits_NV), targets, num_top)
    assert (got.dtype, got.shape) == (ENTRY, (len(rows), 1 + num_top))
    for entries, logits_V, target in zip(got, logits_NV, targets, strict=True):
        best = sorted(range(6), key=lambda i: (-logits_V[i], i))[:num_top]
        want = [expected_entry(logits_V, i) for i in [target, *best]]
        assert [(e["token_id"], e["rank"]) for e in entries] == [(i, rank) for i, _, rank in want]
        np.testing.assert_allclose(entries["logprob"], [w[1] for w in want], rtol=1e-5, atol=1e-6)


def test_lower_ids_win_ties_at_the_boundary_of_a_large_vocabulary() -> None:
    """Logits in bf16 steps: many equal ones."""
    logits_NV = torch.randn(20, 5000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    want = [sorted(range(5000), key=lambda i: (-row[i], i))[:7] for row in logits_NV.tolist()]
    assert top_ids(logits_NV, 7).tolist() == want


def test_rows_that_are_not_finite_disturb_no_others() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 0.0], [1.0, float("nan"), 0.0]])
    got = score(logits_NV, [1, 1], 2)
    np.testing.assert_array_equal(got[0], score(logits_NV[:1], [1], 2)[0])
    assert np.isnan(got[1]["logprob"]).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"num_hidden_layers": 2, "hidden_size": 76, "vocab_size": 299}
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3_moe", overrides)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def decoder(request: pytest.FixtureRequest, checkpoint: Path) -> MoeDecoder:
    return load_decoder(checkpoint, request.param)


def prompt_of(decoder: MoeDecoder, length: int, seed: int = 0) -> list[int]:
    tokens = np.random.default_rng(seed).integers(0, decoder.config.vocab_size, length)
    return [int(token) for token in tokens]


class Scored:
    """A prompt on its way through a harness, scored chunk by chunk."""

    def __init__(self, harness: Harness, prompt: list[int]) -> None:
        self._prompt = prompt
        self._blocks = harness.blocks_for(len(prompt))
        self._parts: list[PromptLogprobs] = []
        self.done = 0

    def next_chunk(self, size: int) -> Chunk:
        start, self.done = self.done, min(self.done + size, len(self._prompt))
        return Chunk(
            self._prompt[start : self.done],
            start,
            self._blocks,
            wants_logits=self.done == len(self._prompt),
            wants_rows=False,
            score_targets=self._prompt[start + 1 : self.done + 1],
            num_top=TOP,
        )

    def add(self, scores: tuple[PromptLogprobs, ...]) -> None:
        self._parts += scores

    def entries(self) -> PromptLogprobs:
        return PromptLogprobs(np.concatenate(self._parts))


def scored_in_chunks(decoder: MoeDecoder, prompt: list[int], size: int) -> PromptLogprobs:
    harness = Harness(decoder, seed=size)
    scored = Scored(harness, prompt)
    while scored.done < len(prompt):
        scored.add(harness.runner.execute([scored.next_chunk(size)]).scores)
    return scored.entries()


def test_scores_are_those_of_the_models_logits(decoder: MoeDecoder) -> None:
    prompt = prompt_of(decoder, 150)  # more than two slices
    logits_TV = solo_run(decoder, prompt).logits.numpy()
    got = scored_in_chunks(decoder, prompt, 150)
    assert got.shape == (149, 1 + TOP)
    for position in range(149):
        best = np.argsort(-logits_TV[position], kind="stable")[:TOP]
        want = [expected_entry(logits_TV[position], int(i)) for i in [prompt[position + 1], *best]]
        assert [(e["token_id"], e["rank"]) for e in got[position]] == [(i, rank) for i, _, rank in want]
        np.testing.assert_allclose(got[position]["logprob"], [w[1] for w in want], rtol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 16, 100])
def test_scores_do_not_depend_on_chunks(decoder: MoeDecoder, size: int) -> None:
    prompt = prompt_of(decoder, 150 if size > 1 else 70)
    whole = scored_in_chunks(decoder, prompt, len(prompt))
    assert scored_in_chunks(decoder, prompt, size).tobytes() == whole.tobytes()


def test_scores_do_not_depend_on_the_batch(decoder: MoeDecoder) -> None:
    prompts = [prompt_of(decoder, length, seed=length) for length in (90, 2, 33, 17)]
    harness = Harness(decoder)
    scored = [Scored(harness, prompt) for prompt in prompts]
    plain = harness.blocks_for(1)
    for size in (1, 5, 60, 90):
        # Longer chunks are computed last, and one sequence wants no scores at all.
        active = [s for s, prompt in zip(scored, prompts, strict=True) if s.done < len(prompt)]
        unscored = Chunk([7], 0, plain, wants_logits=True, wants_rows=False)
        chunks = [s.next_chunk(size + i) for i, s in enumerate(active)]
        output = harness.runner.execute([chunks[0], unscored, *chunks[1:]])
        with_targets = [s for s, c in zip(active, chunks, strict=True) if c.score_targets]
        for part, one in zip(output.scores, with_targets, strict=True):
            one.add((part,))
    for prompt, one in zip(prompts, scored, strict=True):
        assert one.entries().tobytes() == scored_in_chunks(decoder, prompt, len(prompt)).tobytes()
