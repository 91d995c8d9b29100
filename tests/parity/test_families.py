"""Every family's synthetic checkpoint against transformers' own class: fp32 logits and experts, bf16 rows."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from common.model.families import FAMILIES, parse_config
from tests.parity.agreement import Agreement, Bf16Agreement, random_tokens, run_engine, text_tokens
from tests.parity.reference import run_reference
from tests.unit.model.harness import make_checkpoint


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("family") / request.param, request.param, {})


@pytest.fixture(params=["random", "text"])
def tokens(request: pytest.FixtureRequest, checkpoint: Path) -> list[int]:
    if request.param == "text":
        return text_tokens(checkpoint)
    return random_tokens(parse_config(checkpoint).vocab_size)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_experts_and_logits_equal_those_of_transformers_in_fp32(
    checkpoint: Path, tokens: list[int], kernels: str
) -> None:
    answer, config = run_engine(checkpoint, tokens, kernels=kernels), parse_config(checkpoint)
    agreement = Agreement.of(answer, run_reference(checkpoint, tokens))
    assert agreement.num_differing == 0
    assert agreement.logit_error < 1e-4
    # A tie that fell the other way ends the comparison; where that was early, nothing has been compared.
    assert agreement.num_sets > 400 * len(config.moe_layers)
    dense = sorted(set(range(config.num_layers)) - config.moe_layers)
    assert not answer.rows_TLK[:, dense].any()


def test_bf16_rows_are_as_often_those_of_transformers_as_its_own_are(
    checkpoint: Path, record_property: Callable[[str, object], None]
) -> None:
    """bf16 rounds differently in every implementation; transformers' own bf16 and fp32 show how much that is."""
    agreement = Bf16Agreement.measure(checkpoint)
    for name, share in dataclasses.asdict(agreement).items():
        record_property(name, share)
    assert agreement.yardstick > 0.9
    assert agreement.with_bf16 > agreement.yardstick - 0.05
    assert agreement.with_fp32 > agreement.yardstick - 0.05


def test_a_config_that_transformers_saves_reads_the_same(checkpoint: Path, tmp_path: Path) -> None:
    """Version 5 spells keys differently from the checkpoints on the hub, and leaves some out."""
    AutoConfig.from_pretrained(checkpoint).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_bytes() != (checkpoint / "config.json").read_bytes()
    assert parse_config(tmp_path) == parse_config(checkpoint)


def test_the_tokenizer_is_the_one_that_transformers_loads(checkpoint: Path) -> None:
    text = "Sliding windows, é 한, and\n\t tabs"
    expected = AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"]
    assert Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids == expected
