"""docs/models.md lists every family, and docs/add-a-model.md shows a module as it is."""

import math
import re
from pathlib import Path

import pytest

from common.model.families import FAMILIES, config_from_json
from common.model.families.family import Family
from common.model.presets import synthetic_config
from common.model.tensors import checkpoint_tensors

ROOT = Path(__file__).parents[2]
MODELS = (ROOT / "docs" / "models.md").read_text()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_every_family_is_described_and_measured(family: Family) -> None:
    assert f"| `{family.model_type}` | `{family.architecture}` |" in MODELS
    row = re.search(rf"^\| `{family.model_type}` \| ([\d.]+) M \| [\d,]+ of ([\d,]+) \|", MODELS, re.M)
    assert row is not None
    config = config_from_json(synthetic_config(family.model_type, "tiny", {}), {}, source="config.json")
    assert row[1] == f"{sum(map(math.prod, checkpoint_tensors(config).values())) / 1e6:.1f}"
    # Every set of both sequences was compared: no tie cut the comparison short.
    assert int(row[2].replace(",", "")) == 2 * 520 * len(config.moe_layers)


def test_no_family_is_described_that_is_not_there() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| `\w+ForCausalLM`", MODELS, re.M)) == set(FAMILIES)


def test_the_module_that_is_shown_is_the_real_one() -> None:
    text = (ROOT / "docs" / "add-a-model.md").read_text()
    [file] = re.findall(r"This is all of `([\w/]+\.py)`", text)
    [shown] = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert shown == (ROOT / file).read_text()


@pytest.mark.parametrize("page", ["models.md", "add-a-model.md"])
def test_files_that_are_named_exist(page: str) -> None:
    for name in re.findall(r"`((?:common|tests)/[\w/.]+)`", (ROOT / "docs" / page).read_text()):
        assert (ROOT / name).exists(), name
