"""The tie rule of the second oracle."""

import torch

from deploy.verify.transformers_oracle import compare_sets

# Two positions, layers 1 and 4, four experts, two of them chosen.
SCORES_TME = torch.tensor(
    [
        [[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]],
        [[1.0, 5.0, 1.0 + 5e-5, 0.0], [2.0, 0.0, 3.0, 1.0]],
    ]
)
RIGHT_TMK = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [0, 2]]])


def verdict(rows_TMK: torch.Tensor) -> tuple[int, str | None]:
    agreement, difference = compare_sets(SCORES_TME, rows_TMK, moe_layers=[1, 4], start=10)
    assert agreement.num_sets == 4
    return agreement.num_equal, difference.detail if difference else None


def test_order_inside_a_set_does_not_matter() -> None:
    assert verdict(RIGHT_TMK.flip(2)) == (4, None)


def test_an_unequal_set_is_a_difference() -> None:
    rows_TMK = RIGHT_TMK.clone()
    rows_TMK[0, 1] = torch.tensor([3, 1])
    assert verdict(rows_TMK) == (3, "position 10, layer 4: [3, 1] instead of [3, 2], gap 1.0e+00")


def test_a_tie_is_no_difference_and_excuses_what_follows() -> None:
    rows_TMK = RIGHT_TMK.clone()
    rows_TMK[1] = torch.tensor([[1, 0], [1, 3]])
    assert verdict(rows_TMK) == (2, None)


def test_a_tie_does_not_excuse_what_came_before() -> None:
    rows_TMK = RIGHT_TMK.clone()
    rows_TMK[0, 0, 1] = 3
    rows_TMK[1, 0] = torch.tensor([1, 0])
    assert verdict(rows_TMK)[1] == "position 10, layer 1: [0, 3] instead of [0, 1], gap 1.0e+00"
