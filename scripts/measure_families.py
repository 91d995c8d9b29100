"""Prints how far each family agrees with transformers on a synthetic checkpoint: the table of docs/models.md."""

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.model.families import FAMILIES, parse_config
from common.model.synthesize import synthesize
from common.model.tensors import checkpoint_tensors
from tests.parity.agreement import Agreement, Bf16Agreement, random_tokens, run_engine, text_tokens
from tests.parity.reference import run_reference

_HEADER = (
    "family",
    "parameters",
    "fp32: equal expert sets",
    "largest logits difference",
    "bf16 rows as transformers' bf16",
    "bf16 rows as transformers' fp32",
    "transformers' bf16 as its fp32",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny", help="size of the checkpoints (default: %(default)s)")
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help="default: all")
    arguments = parser.parse_args()
    print(_line(_HEADER), _line(["---"] * len(_HEADER)), sep="\n")
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / family
            synthesize(family, arguments.preset, 0, {}, path)
            print(_line([f"`{family}`", *_measure(path)]), flush=True)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _measure(path: Path) -> Iterator[str]:
    """Cells of one family, over random tokens and text."""
    config = parse_config(path)
    sequences = [random_tokens(config.vocab_size), text_tokens(path)]
    num_parameters = sum(map(math.prod, checkpoint_tensors(config).values()))
    yield f"{num_parameters / 1e6:,.1f} M"
    fp32 = [Agreement.of(run_engine(path, tokens), run_reference(path, tokens)) for tokens in sequences]
    num_sets = sum(one.num_sets for one in fp32)
    yield f"{num_sets - sum(one.num_differing for one in fp32):,} of {num_sets:,}"
    yield f"{max(one.logit_error for one in fp32):.1e}"
    bf16 = Bf16Agreement.measure(path)
    for share in (bf16.with_bf16, bf16.with_fp32, bf16.yardstick):
        yield f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
