"""The order in which torch's BLAS adds up fp32 products: it must depend neither on the rows nor on the threads."""

import os
from pathlib import Path

#: MKL's conditional numerical reproducibility. Without it MKL divides the sums of a product among threads where it has
#: few rows and outputs, so that a row's bits depend on how many other rows there are: seen with 2 and more threads on
#: an Intel processor. STRICT forbids that; processors of others do not support it, and showed no such thing without.
_REPRODUCIBLE = "AUTO,STRICT"

_CPUINFO = Path("/proc/cpuinfo")


def fix_summation_order() -> None:
    """To be called before the first product of the process, which is when MKL reads the variable."""
    if _is_intel():
        os.environ["MKL_CBWR"] = _REPRODUCIBLE


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in _CPUINFO.read_text()
    except OSError:
        return False
