"""How far this engine and transformers agree on the same checkpoint and tokens.

Shape suffixes: T tokens, V vocabulary, L layers, K experts per token.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from common.model.families import parse_config
from common.routing.record import RoutingArray
from tests.parity.reference import Reference, differing_rows, first_tie, run_reference
from tests.unit.model.harness import Harness, load_decoder

NUM_TOKENS = 520

#: English that no checkpoint's tokenizer was trained on.
TEXT = Path(__file__).parents[2] / "LICENSE"


@dataclass(frozen=True, slots=True)
class Answer:
    """What this engine computes for one sequence."""

    logits_TV: torch.Tensor
    rows_TLK: RoutingArray


def random_tokens(vocab_size: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, NUM_TOKENS)]


def text_tokens(path: Path) -> list[int]:
    """The beginning of a text, by the checkpoint's own tokenizer."""
    tokens: list[int] = Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT.read_text()).ids
    assert len(tokens) > NUM_TOKENS
    return tokens[:NUM_TOKENS]


def run_engine(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32, kernels: str = "auto") -> Answer:
    """Computes the sequence in chunks, two of them of one token."""
    harness = Harness(load_decoder(path, dtype, kernels))
    blocks = harness.blocks_for(len(tokens))
    bounds = [0, 200, 201, 202, 400, len(tokens)]
    logits = [harness.all_logits(tokens[begin:end], begin, blocks) for begin, end in pairwise(bounds)]
    return Answer(torch.cat(logits), harness.rows(blocks, len(tokens)))


@dataclass(frozen=True, slots=True)
class Agreement:
    """fp32 against fp32. Where the first difference is a tie that fell the other way, only the tokens before it are
    compared, because what follows comes from other values; where it is none, everything is.
    """

    #: Sets of experts that are compared, one per token and MoE layer.
    num_sets: int
    #: Those that differ.
    num_differing: int
    #: Whether there was such a tie.
    tied: bool
    #: Largest difference of a logit, over the root mean square of the reference's logits.
    logit_error: float

    @classmethod
    def of(cls, answer: Answer, reference: Reference) -> "Agreement":
        tie = first_tie(answer.rows_TLK, reference)
        num_tokens = len(answer.rows_TLK) if tie is None else tie
        expected_TV = reference.logits_TV[:num_tokens]
        worst = (answer.logits_TV[:num_tokens] - expected_TV).abs().max()
        return cls(
            num_sets=num_tokens * len(reference.moe_layers),
            num_differing=len(differing_rows(answer.rows_TLK, reference)),
            tied=tie is not None,
            logit_error=float(worst / expected_TV.square().mean().sqrt()),
        )


@dataclass(frozen=True, slots=True)
class Bf16Agreement:
    """Shares of rows, all layers of a token, whose sets of experts are equal; no tie is forgiven."""

    #: Of this engine's bf16 with transformers' bf16, and with transformers' fp32.
    with_bf16: float
    with_fp32: float
    #: Of transformers' bf16 with its own fp32: what to expect of two right answers.
    yardstick: float

    @classmethod
    def measure(cls, path: Path) -> "Bf16Agreement":
        """Over random tokens and text: one sequence of either alone says little about a few percent."""
        shares = []
        for tokens in (random_tokens(parse_config(path).vocab_size), text_tokens(path)):
            rows_TLK = run_engine(path, tokens, torch.bfloat16).rows_TLK
            fp32, bf16 = (run_reference(path, tokens, dtype) for dtype in (torch.float32, torch.bfloat16))
            comparisons = (bf16, rows_TLK), (fp32, rows_TLK), (fp32, _rows_of(bf16))
            shares.append([_equal_rows(reference, rows) for reference, rows in comparisons])
        return cls(*map(float, np.mean(shares, axis=0)))


def _equal_rows(reference: Reference, rows_TLK: RoutingArray) -> float:
    return float((~reference.unequal_sets(rows_TLK).any(axis=1)).mean())


def _rows_of(reference: Reference) -> RoutingArray:
    """A reference's choices as rows, with zeros in dense layers."""
    num_tokens, _, top_k = reference.ids_TMK.shape
    rows_TLK = np.zeros((num_tokens, max(reference.moe_layers) + 1, top_k), np.uint16)
    rows_TLK[:, reference.moe_layers] = reference.ids_TMK
    return rows_TLK
