"""Reading keys of a config.json: spellings, null and absent, bounds."""

import pytest

from common.errors import CheckpointError
from common.model.config_reader import ConfigReader


def _reader(**values: object) -> ConfigReader:
    return ConfigReader(values, "/m/config.json")


def test_any_spelling_counts() -> None:
    assert _reader(num_local_experts=64).count("num_experts", "num_local_experts") == 64
    assert _reader(num_experts=None, num_local_experts=64).count("num_experts", "num_local_experts") == 64
    assert _reader(num_experts=64, num_local_experts=64).count("num_experts", "num_local_experts") == 64


def test_null_is_told_from_absent_where_it_means_something() -> None:
    for values, expected in (({}, 7), ({"rank": None}, None), ({"rank": 3}, 3)):
        assert _reader(**values).optional_count("rank", "other", default=7) == expected
    assert _reader(rank=None, other=3).optional_count("rank", "other", default=7) == 3
    assert [_reader(**values).flag("on", default=True) for values in ({}, {"on": None})] == [True, False]
    assert _reader().count_not_null("n_group", default=8) == 8
    with pytest.raises(CheckpointError, match="n_group is None, but must be a positive integer"):
        _reader(n_group=None).count_not_null("n_group", default=8)


def test_spellings_that_contradict_each_other_are_refused() -> None:
    reader = _reader(num_experts=128, num_local_experts=64)
    with pytest.raises(CheckpointError) as caught:
        reader.count("num_experts", "num_local_experts")
    message = caught.value.message
    assert message.startswith("/m/config.json: num_local_experts is 64, but must be what num_experts is, 128")


@pytest.mark.parametrize("value", [2**31, 10**400])
def test_numbers_that_no_tensor_can_have_are_refused(value: int) -> None:
    for read in (_reader(size=value).count, _reader(size=value).whole):
        with pytest.raises(CheckpointError, match=rf"size is {value}, but must be .* at most 2147483647"):
            read("size")
    assert _reader(size=2**31 - 1).count("size") == 2**31 - 1


@pytest.mark.parametrize(
    ("names", "most"),
    [
        (("num_hidden_layers",), 10_000),
        (("num_nextn_predict_layers", "num_mtp_layers"), 10_000),
        (("num_experts", "num_local_experts"), 65_536),
        (("n_shared_experts",), 65_536),
        (("num_attention_heads",), 2**24),
    ],
)
def test_counts_that_no_model_has_are_refused_in_the_spelling_given(names: tuple[str, ...], most: int) -> None:
    for name in names:
        for read in (_reader(**{name: most + 1}).count, _reader(**{name: most + 1}).whole):
            with pytest.raises(CheckpointError, match=f"json: {name} is {most + 1}, but must be .* at most {most}$"):
                read(*names)
        assert _reader(**{name: most}).count(*names) == most
