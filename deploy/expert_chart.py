"""A small picture of how often each expert was used. Shape suffixes: T positions, L layers, K experts, E expert ids."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from rich.text import Text

from common.routing.record import RoutingArray

_BARS = " ▁▂▃▄▅▆▇█"
#: The same heights for a terminal that has no block characters.
_DIGITS = " 12345678"
#: More experts than that share columns.
MAX_COLUMNS = 64


def expert_counts(rows_TLK: RoutingArray, num_experts: int) -> npt.NDArray[np.int64]:
    """How often each expert of each layer was chosen: [L, E]. Dense layers, which hold only zeros, count nothing."""
    counts_LE = np.stack([np.bincount(rows_TLK[:, i].ravel(), minlength=num_experts) for i in range(rows_TLK.shape[1])])
    if rows_TLK.shape[2] > 1:  # an MoE layer never has one expert twice in a row
        dense_L = (rows_TLK == 0).all(axis=(0, 2))
        counts_LE[dense_L] = 0
    return counts_LE


def chart_lines(rows_TLK: RoutingArray, *, blocks: bool) -> Iterator[Text]:
    """One line per layer; a column is an expert, or a few neighbours. Heights are relative to the layer's maximum."""
    if rows_TLK.shape[0] == 0:
        return
    counts_LE = expert_counts(rows_TLK, int(rows_TLK.max()) + 1)
    width = -(-counts_LE.shape[1] // MAX_COLUMNS)
    for layer, counts_E in enumerate(counts_LE):
        line = Text(f"layer {layer:>3} ")
        if not counts_E.any():
            yield line.append("dense")
            continue
        line.append(f"|{_bars(_grouped(counts_E, width), _BARS if blocks else _DIGITS)}|", style="cyan")
        top = np.argsort(-counts_E, kind="stable")[:3]
        yield line.append("  most used: " + ", ".join(f"{e} ({counts_E[e]}×)" for e in top if counts_E[e]))


def _grouped(counts_E: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    padded = np.pad(counts_E, (0, -len(counts_E) % width))
    grouped: npt.NDArray[np.int64] = padded.reshape(-1, width).sum(axis=1)
    return grouped


def _bars(counts: npt.NDArray[np.int64], levels: str) -> str:
    """Zero is blank; anything above is at least the lowest bar."""
    highest = len(levels) - 1
    return "".join(levels[-(-int(count) * highest // int(counts.max()))] for count in counts)
