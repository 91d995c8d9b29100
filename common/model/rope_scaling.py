"""How rotary frequencies are stretched beyond the trained context: one record per kind. Imports no torch.

Lengths are in positions. `original_length` is the context before scaling.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al., arXiv 2306.15595): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK: the base grows with the length of the sequence once that exceeds the original one.

    A frequency that changes while a sequence grows can neither be chunked nor cached exactly, so the length that
    counts is the longest one the engine serves: the frequencies are fixed at load.
    """

    factor: float
    original_length: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071): a ramp over the pairs between stretched and kept frequencies.

    The ramp lies between the pairs that turn `beta_fast` and `beta_slow` times over the original context, widened to
    whole pairs if `truncate`.
    """

    factor: float
    original_length: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (Ding et al., arXiv 2402.13753): a divisor for each pair, other ones beyond the original length.

    As with `DynamicScaling` the longest sequence that the engine serves decides, once, at load.
    """

    original_length: float
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling
