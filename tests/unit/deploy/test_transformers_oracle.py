"""The tie rule of the second oracle, how clear a router's choice was, and which models are no oracle."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.model.config import RouterConfig
from common.model.families import parse_config
from common.model.quantized.config import block_fp8
from common.model.synthesize import synthesize
from deploy.verify.router_tap import Choices, choice_gaps
from deploy.verify.transformers_oracle import TransformersOracle, compare_sets

# Two positions, layers 1 and 4, four experts, two of them chosen.
RIGHT_TMK = torch.tensor([[[0, 1], [3, 2]], [[1, 2], [2, 0]]])
GAPS_TM = torch.tensor([[1.0, 1.0], [5e-5, 1.0]])


def verdict(rows_TMK: torch.Tensor) -> tuple[int, str | None]:
    agreement, difference = compare_sets(Choices(RIGHT_TMK, GAPS_TM), rows_TMK, moe_layers=[1, 4], start=10)
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


# exp of these is 1, 2, 3 and 4, so that the probabilities are tenths; as odds they are the sigmoids 1/2, 2/3, 3/4, 4/5.
LOGITS_TE = torch.tensor([[1.0, 4.0, 3.0, 2.0]]).log()


@pytest.mark.parametrize(
    ("router", "top_k", "gap"),
    [
        (RouterConfig("softmax"), 2, 0.1),
        (RouterConfig("sigmoid"), 1, 4 / 5 - 3 / 4),
        (RouterConfig("sigmoid"), 3, 2 / 3 - 1 / 2),
        (RouterConfig("chosen_softmax"), 3, 0.693147),
        (RouterConfig("softmax"), 4, float("inf")),
    ],
)
def test_the_gap_is_between_the_last_chosen_and_the_first_other(router: RouterConfig, top_k: int, gap: float) -> None:
    torch.testing.assert_close(choice_gaps(LOGITS_TE, router, top_k), torch.tensor([gap]))


def test_a_correction_moves_the_boundary() -> None:
    correction_E = torch.tensor([0.26, 0.0, 0.0, 0.0])  # 0.76 for expert 0, between 0.8 and 0.75
    gaps_T = choice_gaps(LOGITS_TE, RouterConfig("sigmoid", correction_bias=True), 1, correction_E)
    torch.testing.assert_close(gaps_T, torch.tensor([0.04]))


@pytest.mark.parametrize(("num_group_scores", "gap"), [(1, 0.4 - 0.3), (2, 0.5 - 0.5)])
def test_a_choice_of_groups_is_as_clear_as_its_closest_boundary(num_group_scores: int, gap: float) -> None:
    router = RouterConfig("softmax", num_groups=2, num_groups_kept=1, num_group_scores=num_group_scores)
    # Groups (0.1, 0.4) and (0.3, 0.2). Inside the first one the best expert is ahead by 0.3.
    torch.testing.assert_close(choice_gaps(LOGITS_TE, router, 1), torch.tensor([gap]), atol=1e-6, rtol=0)


def test_where_groups_leave_no_choice_only_they_count() -> None:
    router = RouterConfig("softmax", num_groups=2, num_groups_kept=1)
    torch.testing.assert_close(choice_gaps(LOGITS_TE, router, 2), torch.tensor([0.1]))


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_a_model_that_does_not_use_exactly_the_tensors_is_no_oracle(tmp_path: Path, change: str) -> None:
    synthesize("qwen3_moe", "tiny", 0, {"num_hidden_layers": 1}, tmp_path)
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    name = "model.layers.0.self_attn.k_norm.weight"
    tensors[f"{name}_scale"] = tensors[name].clone()
    if change == "missing":
        del tensors[name], tensors[f"{name}_scale"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"does not fit the checkpoint's tensors.*k_norm"):
        TransformersOracle.load(tmp_path, parse_config(tmp_path))


def test_what_transformers_cannot_load_is_refused_in_words(tmp_path: Path) -> None:
    synthesize("qwen3_moe", "tiny", 0, {"num_hidden_layers": 1}, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"attention_dropout": "none"}))
    with pytest.raises(ConfigError, match=r"transformers cannot load .*: .*attention_dropout") as caught:
        TransformersOracle.load(tmp_path, parse_config(tmp_path))
    assert str(tmp_path) in caught.value.message


def test_tensors_that_a_quantised_checkpoint_lacks_are_missed(tmp_path: Path) -> None:
    synthesize("qwen3_moe", "tiny", 0, {"num_hidden_layers": 1}, tmp_path, quantization=block_fp8(32, 32))
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    del tensors["model.layers.0.self_attn.k_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"does not fit the checkpoint's tensors.*k_norm"):
        TransformersOracle.load(tmp_path, parse_config(tmp_path))


def test_routers_are_looked_for_in_the_moe_layers(tmp_path: Path) -> None:
    synthesize("qwen3_moe", "tiny", 0, {"num_hidden_layers": 2, "mlp_only_layers": [0]}, tmp_path)
    model = torch.nn.Module()
    with pytest.raises(ConfigError, match=r"router modules in layers \[\], but the MoE layers are \[1\]"):
        TransformersOracle(model, parse_config(tmp_path))
