"""The numbers of docs/capacity.md: by its formulas, which are computed here once more, and by what workers allocate."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.handoff.outgoing import MAX_TRANSFERS
from common.model.families import FAMILIES, config_from_json
from common.model.presets import synthetic_config
from common.model.runner import kv_layout

PAGE = (Path(__file__).parents[2] / "docs" / "capacity.md").read_text()
BF16_BYTES = 2
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint of the table."""

    checkpoint: str
    family: str
    layers: int
    #: (KV heads, head size), or (kv_lora_rank, qk_rope_head_dim).
    heads: tuple[int, int]
    is_latent: bool
    experts: int
    top_k: int
    kv_bytes: int
    row_bytes: int


ROW = re.compile(
    r"^\| ([\w.-]+) \| `(\w+)` \| (\d+) \| (\d+) ([×+]) (\d+) \| (\d+), (\d+) \| ([\d,]+) \| ([\d,]+) \|$", re.M
)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def table() -> list[Row]:
    return [
        Row(
            checkpoint=m[1],
            family=m[2],
            layers=int(m[3]),
            heads=(int(m[4]), int(m[6])),
            is_latent=m[5] == "+",
            experts=int(m[7]),
            top_k=int(m[8]),
            kv_bytes=number(m[9]),
            row_bytes=number(m[10]),
        )
        for m in ROW.finditer(PAGE)
    ]


@pytest.mark.parametrize("row", table(), ids=lambda row: row.checkpoint)
def test_bytes_of_a_token_follow_the_formulas(row: Row) -> None:
    first, second = row.heads
    per_layer = first + second if row.is_latent else 2 * first * second
    assert row.kv_bytes == row.layers * per_layer * BF16_BYTES
    assert row.row_bytes == row.layers * row.top_k * (1 if row.experts <= 256 else 2)
    assert row.row_bytes < 0.01 * row.kv_bytes


@pytest.mark.parametrize("row", table(), ids=lambda row: row.checkpoint)
def test_workers_allocate_that_much(row: Row) -> None:
    first, second = row.heads
    sizes = {"num_hidden_layers": row.layers, "num_experts_per_tok": row.top_k}
    sizes[FAMILIES[row.family].num_experts_keys[0]] = row.experts
    if row.is_latent:
        sizes |= {"kv_lora_rank": first, "qk_rope_head_dim": second}
    else:
        sizes |= {"num_key_value_heads": first, "num_attention_heads": 4 * first, "hidden_size": 4 * first * second}
        # Other families divide the hidden size by the heads.
        if "head_dim" in synthetic_config(row.family, "tiny", {}):
            sizes["head_dim"] = second
    config = config_from_json(synthetic_config(row.family, "tiny", sizes), {}, source="config.json")
    assert kv_layout(config, BLOCK_SIZE, torch.bfloat16).token_bytes == row.kv_bytes
    assert config.routing.row_bytes == row.row_bytes


def test_families_of_every_kind_are_in_the_table() -> None:
    assert len({row.family for row in table()}) == 8


def test_the_worked_example_adds_up() -> None:
    [row] = [row for row in table() if row.checkpoint == "Qwen3-30B-A3B"]
    token_bytes = row.kv_bytes + row.row_bytes
    blocks = 16 * 2**30 // (BLOCK_SIZE * token_bytes)
    blocks_each = -(-(3000 + 1000 - 1) // BLOCK_SIZE)
    weights, per_second = 30.5e9 * BF16_BYTES, 2000 * token_bytes
    for said in (
        f"{weights / 1e9:.1f} GB, or {weights / 2**30:.1f} GiB",
        f"98,304 + 384 = {token_bytes:,} bytes",
        f"| blocks of 16 tokens in 16 GiB | {blocks:,} |",
        f"| tokens in them | {blocks * BLOCK_SIZE:,} |",
        f"4,000 tokens, {blocks_each} blocks",
        f"| conversations at a time, all at their end | {blocks // blocks_each} |",
        f"56.8 + 16 + 4 + 0.4 = {weights / 2**30 + 20.4:.1f} GiB",
        f"2,000 × {token_bytes:,} bytes = {per_second / 1e6:.0f} MB/s, or {8 * per_second / 1e9:.1f} Gbit/s",
    ):
        assert said in PAGE, said


def test_the_number_of_handoffs_is_right() -> None:
    assert f"| handoffs at a time | {MAX_TRANSFERS} per decode worker |" in PAGE
