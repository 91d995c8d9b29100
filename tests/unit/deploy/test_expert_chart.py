"""The picture of expert use."""

import numpy as np

from deploy.expert_chart import MAX_COLUMNS, chart_lines, expert_counts

# Three positions; layer 0 is dense, layer 1 uses expert 3 always and experts 0, 1, 2 once each.
ROWS_TLK = np.array([[[0, 0], [3, 0]], [[0, 0], [3, 1]], [[0, 0], [2, 3]]], np.uint8)


def test_counts_per_expert_and_nothing_for_dense_layers() -> None:
    assert expert_counts(ROWS_TLK, 5).tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 3, 0]]


def test_one_line_per_layer_with_bars_relative_to_the_most_used_expert() -> None:
    dense, moe = (line.plain for line in chart_lines(ROWS_TLK, blocks=True))
    assert dense == "layer   0 dense"
    assert moe == "layer   1 |▃▃▃█|  most used: 3 (3×), 0 (1×), 1 (1×)"


def test_terminals_without_block_characters_get_digits() -> None:
    assert "|3338|" in list(chart_lines(ROWS_TLK, blocks=False))[1].plain


def test_many_experts_share_columns() -> None:
    rows_TLK = np.arange(600, dtype=np.uint16).reshape(300, 1, 2)
    [line] = chart_lines(rows_TLK, blocks=False)
    assert len(line.plain.split("|")[1]) == MAX_COLUMNS - 4  # 600 experts, ten per column


def test_no_rows_no_picture() -> None:
    assert list(chart_lines(ROWS_TLK[:0], blocks=True)) == []
