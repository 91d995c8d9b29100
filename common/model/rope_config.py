"""Rotary embedding settings of a config.json, in both spellings (`rope_theta` + `rope_scaling`, `rope_parameters`)."""

import math
from collections.abc import Callable

from common.errors import CheckpointError
from common.model.config import RopeConfig
from common.model.config_reader import ConfigReader


def read_rope(reader: ConfigReader, default_theta: float) -> RopeConfig:
    """Raises CheckpointError for kinds that are unknown or cannot be computed chunk by chunk."""
    scaling = reader.section("rope_scaling", "rope_parameters")
    kind = scaling.text("rope_type", "type", default="default")
    if kind not in _PARAMETERS:
        raise CheckpointError(
            f"{scaling.source}: rope type {kind!r} is not supported (kinds whose frequencies depend on the length of "
            f"the sequence cannot be computed chunk by chunk); supported: {', '.join(_PARAMETERS)}"
        )
    if reader.raw("partial_rotary_factor") not in (None, 1) or scaling.raw("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(f"{reader.source}: partial_rotary_factor other than 1 is not supported")
    theta = scaling.number("rope_theta", default=reader.number("rope_theta", default=default_theta))
    return RopeConfig(theta, kind, _PARAMETERS[kind](reader, scaling))


def _original_length(reader: ConfigReader, scaling: ConfigReader) -> float:
    """Context length before scaling; a key beside the rope section goes first, as in transformers."""
    trained = reader.number("max_position_embeddings")
    inner = scaling.number("original_max_position_embeddings", default=trained)
    return reader.number("original_max_position_embeddings", default=inner)


def _default(reader: ConfigReader, scaling: ConfigReader) -> dict[str, float]:
    return {}


def _linear(reader: ConfigReader, scaling: ConfigReader) -> dict[str, float]:
    return {"factor": scaling.number("factor")}


def _llama3(reader: ConfigReader, scaling: ConfigReader) -> dict[str, float]:
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    return {key: scaling.number(key) for key in keys} | {"original_length": _original_length(reader, scaling)}


def _yarn(reader: ConfigReader, scaling: ConfigReader) -> dict[str, float]:
    original = _original_length(reader, scaling)
    factor = scaling.number("factor", default=reader.number("max_position_embeddings") / original)
    return {
        "factor": factor,
        "original_length": original,
        "beta_fast": scaling.number("beta_fast", default=32.0),
        "beta_slow": scaling.number("beta_slow", default=1.0),
        "truncate": scaling.flag("truncate", default=True),
        "attention_factor": scaling.number("attention_factor", default=_yarn_attention_factor(scaling, factor)),
    }


def _yarn_attention_factor(scaling: ConfigReader, factor: float) -> float:
    """Temperature of attention under YaRN (Peng et al., arXiv 2309.00071, section 3.4)."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.raw("mscale") and scaling.raw("mscale_all_dim"):
        return temperature(scaling.number("mscale")) / temperature(scaling.number("mscale_all_dim"))
    return temperature(1.0)


_PARAMETERS: dict[str, Callable[[ConfigReader, ConfigReader], dict[str, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
