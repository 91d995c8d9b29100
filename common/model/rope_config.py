"""Rotary embedding settings of a config.json, in both spellings (`rope_theta` + `rope_scaling`, `rope_parameters`).

What is absent is filled in as transformers does. Every complaint is a CheckpointError naming file, key and value.
"""

import math
from collections.abc import Callable, Mapping

from common.errors import CheckpointError
from common.model.config import RopeConfig
from common.model.config_reader import ConfigReader
from common.model.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeScaling,
    YarnScaling,
)

#: No context is stretched or squeezed further; beyond it single precision would run out before the positions do.
_LARGEST_FACTOR = 1e6

#: Positions are 32-bit integers.
_LARGEST_LENGTH = 2**31 - 1


def read_rope(
    reader: ConfigReader,
    default_theta: float,
    rotary_dim: int,
    *,
    default_section: Mapping[str, object] | None = None,
) -> RopeConfig:
    """The rotary embedding of a checkpoint.

    Args:
        default_theta: the family's base frequency where no key gives one.
        rotary_dim: rotated dimensions of a head.
        default_section: the family's scaling where neither `rope_scaling` nor `rope_parameters` is given.

    Raises:
        CheckpointError: a kind is unknown, a value is missing or wrong, or layers differ in their rotary embedding.
    """
    section = _find_section(reader, default_section or {})
    kind = section.text("rope_type", "type", default="default")
    if kind not in _SCALINGS:
        section.fail("rope_type", kind, f"one of {', '.join(_SCALINGS)}")
    theta = section.number("rope_theta", default=reader.number("rope_theta", default=default_theta))
    if theta <= 1:
        reader.fail("rope_theta", theta, "above 1")
    scaling = _SCALINGS[kind](reader, section)
    _check_pairs(scaling, rotary_dim, section)
    return RopeConfig(theta, scaling, _attention_factor(scaling, reader, section))


def read_rotary_share(reader: ConfigReader, default: float | None = None) -> float:
    """`partial_rotary_factor`: the share of each head's dimensions, the leading ones, that is rotated.

    Args:
        default: the family's own where no key gives one; None for a family that always rotates whole heads.

    Raises:
        CheckpointError: it is not above 0 and at most 1, or not 1 in a family that always rotates whole heads.
    """
    key = "partial_rotary_factor"
    beside = reader.number(key, default=1.0 if default is None else default)
    share = _find_section(reader, {}).number(key, default=beside)
    if share > 1:
        reader.fail(key, share, "at most 1")
    if default is None and share != 1:
        reader.fail(key, share, "1, because this family rotates whole heads")
    return share


def read_softmax_scale_factor(reader: ConfigReader) -> float:
    """What latent attention multiplies the scale of its softmax by.

    DeepSeek's `mscale_all_dim` tempers queries and keys in all dimensions, not only the rotated ones, so it enters the
    scale, squared. The other families have no such factor, whatever their keys say.
    """
    section = _find_section(reader, {})
    mscale_all_dim = _mscale(section, "mscale_all_dim")
    if section.text("rope_type", "type", default="default") == "default" or not mscale_all_dim:
        return 1.0
    return _temperature(_factor(section, default=_length_ratio(reader, section)), mscale_all_dim) ** 2


def _find_section(reader: ConfigReader, default: Mapping[str, object]) -> ConfigReader:
    """The object that describes the rotary embedding: `rope_scaling`, `rope_parameters`, or what both say together.

    transformers 5 saves the base and the share of rotated dimensions in `rope_parameters`, and model cards ask to add
    `rope_scaling` for a longer context; transformers itself would then forget the base.
    """
    scaling, parameters = _read_section(reader, "rope_scaling"), _read_section(reader, "rope_parameters")
    if scaling and parameters:
        return ConfigReader(_joined(reader, scaling, parameters), f"{reader.source}: rope_scaling")
    name = "rope_scaling" if scaling else "rope_parameters"
    return ConfigReader(scaling or parameters or default, f"{reader.source}: {name}")


def _read_section(reader: ConfigReader, name: str) -> Mapping[str, object]:
    """One of the two objects, empty if absent; where it holds one for each kind of layer, these must be the same."""
    section = reader.section(name)
    values: Mapping[str, object] = reader.raw(name) or {}
    nested = [value for value in values.values() if isinstance(value, dict)]
    if not nested:
        return values
    if any(value != nested[0] for value in values.values()):
        raise CheckpointError(
            f"{section.source}: {', '.join(values)} differ; layers that differ in their rotary embedding are not "
            "supported, all must have the same"
        )
    return nested[0]


def _joined(
    reader: ConfigReader, scaling: Mapping[str, object], parameters: Mapping[str, object]
) -> Mapping[str, object]:
    """Both objects as one. Raises CheckpointError where `rope_parameters` has a kind or value of its own."""
    source = f"{reader.source}: rope_parameters"
    first = _spelled_alike(scaling, f"{reader.source}: rope_scaling")
    second = _spelled_alike(parameters, source)
    if second["rope_type"] == "default":
        del second["rope_type"]  # which says nothing against scaling
    for key, value in second.items():
        if first.get(key, value) != value:
            wanted = f"what it is in rope_scaling, {first[key]!r}; remove one of the two"
            ConfigReader(parameters, source).fail(key, value, wanted)
    return second | first


def _spelled_alike(values: Mapping[str, object], source: str) -> dict[str, object]:
    """Without nulls, and with the kind under one name."""
    kind = ConfigReader(values, source).raw("rope_type", "type")
    given = {key: value for key, value in values.items() if value is not None and key != "type"}
    return given | {"rope_type": "default" if kind is None else kind}


def _check_pairs(scaling: RopeScaling | None, rotary_dim: int, section: ConfigReader) -> None:
    """Raises CheckpointError if the scaling does not go with the number of rotated pairs."""
    if isinstance(scaling, DynamicScaling) and rotary_dim == 2:
        section.fail("rope_type", "dynamic", "another kind where only 2 dimensions of a head are rotated")
    if isinstance(scaling, LongScaling):
        for key, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
            if len(factors) != rotary_dim // 2:
                section.fail(key, list(factors), f"a list of {rotary_dim // 2} numbers, one for each rotated pair")


def _factor(section: ConfigReader, default: float | None = None) -> float:
    factor = section.number("factor", default=default)
    if factor > _LARGEST_FACTOR:
        section.fail("factor", factor, f"at most {_LARGEST_FACTOR:g}")
    return factor


def _original_length(reader: ConfigReader, section: ConfigReader) -> float:
    """Context length before scaling; a key beside the rope section goes first, as in transformers."""
    trained = reader.number("max_position_embeddings")
    inner = section.number("original_max_position_embeddings", default=trained)
    length = reader.number("original_max_position_embeddings", default=inner)
    if length > _LARGEST_LENGTH:
        section.fail("original_max_position_embeddings", length, f"at most {_LARGEST_LENGTH}")
    return length


def _length_ratio(reader: ConfigReader, section: ConfigReader) -> float:
    """By how much the context is longer than the original one: what `factor` is where it is absent."""
    return reader.number("max_position_embeddings") / _original_length(reader, section)


def _default(reader: ConfigReader, section: ConfigReader) -> None:
    return None


def _linear(reader: ConfigReader, section: ConfigReader) -> LinearScaling:
    return LinearScaling(_factor(section))


def _dynamic(reader: ConfigReader, section: ConfigReader) -> DynamicScaling:
    """The original length is the model's own, as in transformers; `original_max_position_embeddings` is not read."""
    factor = _factor(section)
    if factor < 1:  # the base could turn negative
        section.fail("factor", factor, "at least 1")
    return DynamicScaling(factor, reader.number("max_position_embeddings"))


def _llama3(reader: ConfigReader, section: ConfigReader) -> Llama3Scaling:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        section.fail("high_freq_factor", high, f"above low_freq_factor, {low:g}")
    return Llama3Scaling(_factor(section), low, high, _original_length(reader, section))


def _yarn(reader: ConfigReader, section: ConfigReader) -> YarnScaling:
    fast, slow = section.number("beta_fast", default=32.0), section.number("beta_slow", default=1.0)
    if fast < slow:
        section.fail("beta_fast", fast, f"at least beta_slow, {slow:g}")
    return YarnScaling(
        factor=_factor(section, default=_length_ratio(reader, section)),
        original_length=_original_length(reader, section),
        beta_fast=fast,
        beta_slow=slow,
        truncate=section.flag("truncate", default=True),
    )


def _longrope(reader: ConfigReader, section: ConfigReader) -> LongScaling:
    return LongScaling(
        original_length=_original_length(reader, section),
        short_factors=_pair_factors(section, "short_factor"),
        long_factors=_pair_factors(section, "long_factor"),
    )


def _pair_factors(section: ConfigReader, key: str) -> tuple[float, ...]:
    values = section.raw(key)
    if values is None:
        raise CheckpointError(f"{section.source}: {key} is missing")
    if not isinstance(values, list):
        section.fail(key, values, "a list of numbers")
    for index, value in enumerate(values):
        if type(value) not in (int, float) or not 1 / _LARGEST_FACTOR <= value <= _LARGEST_FACTOR:
            wanted = f"a number from {1 / _LARGEST_FACTOR:g} to {_LARGEST_FACTOR:g}"
            section.fail(f"{key}[{index}]", value, wanted)
    return tuple(float(value) for value in values)


def _attention_factor(scaling: RopeScaling | None, reader: ConfigReader, section: ConfigReader) -> float:
    """What cosine and sine are multiplied by; kinds other than YaRN and LongRoPE have none, whatever the keys say."""
    match scaling:
        case YarnScaling(factor):
            return section.number("attention_factor", default=_yarn_attention_factor(factor, section))
        case LongScaling(original_length):
            inferred = _longrope_attention_factor(original_length, reader, section)
            return section.number("attention_factor", default=inferred)
        case _:
            return 1.0


def _yarn_attention_factor(factor: float, section: ConfigReader) -> float:
    mscale, mscale_all_dim = _mscale(section, "mscale"), _mscale(section, "mscale_all_dim")
    if mscale and mscale_all_dim:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return _temperature(factor, 1.0)


def _longrope_attention_factor(original_length: float, reader: ConfigReader, section: ConfigReader) -> float:
    """LongRoPE's compensation for the entropy of a longer context."""
    factor = _factor(section, default=_length_ratio(reader, section))
    if factor <= 1:
        return 1.0
    if original_length <= 1:
        section.fail("original_max_position_embeddings", original_length, "above 1")
    return math.sqrt(1 + math.log(factor) / math.log(original_length))


def _mscale(section: ConfigReader, key: str) -> float:
    """0 and absent both mean that the setting is not in use."""
    value = section.raw(key)
    if value is None or (type(value) in (int, float) and value == 0):
        return 0.0
    mscale = section.number(key)
    if mscale > _LARGEST_FACTOR:  # its square is what attention is scaled by
        section.fail(key, mscale, f"at most {_LARGEST_FACTOR:g}")
    return mscale


def _temperature(factor: float, mscale: float) -> float:
    """Temperature of attention under YaRN (Peng et al., arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_SCALINGS: dict[str, Callable[[ConfigReader, ConfigReader], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
