"""`moerelay make-model`: writes a seeded random checkpoint in Hugging Face form, with a tokenizer."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from common.arguments import ArgumentParser
from common.model.families import FAMILIES
from common.model.presets import PRESETS
from common.model.quantized.config import MXFP4, block_fp8
from deploy.arguments import integer
from deploy.extras import needs_worker_extra

#: The forms in which published checkpoints come.
_QUANTIZATIONS = {"fp8": block_fp8(), "mxfp4": MXFP4}

Override = bool | int | float | str | list[object] | None


def override(text: str) -> tuple[str, Override]:
    """'num_experts=257' → ("num_experts", 257). Values are JSON; what is no JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, e.g. num_experts=257")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser("moerelay make-model", "Write a seeded random checkpoint in Hugging Face form.")
    parser.add_argument("--family", choices=FAMILIES, required=True, help="architecture")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes (default: %(default)s)")
    parser.add_argument("--seed", type=integer(0), default=0, help="default: %(default)s")
    parser.add_argument(
        "--set",
        type=override,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="a value of config.json instead of the preset's, e.g. num_experts=257 or mlp_only_layers=[0]; repeatable",
    )
    parser.add_argument("--quantization", choices=_QUANTIZATIONS, help="store weights in this form")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must be empty or not exist")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = command_line().parse_args(argv)
    with needs_worker_extra("make-model"):
        from common.model.synthesize import synthesize

    synthesize(
        arguments.family,
        arguments.preset,
        arguments.seed,
        dict(arguments.overrides),
        arguments.out,
        quantization=_QUANTIZATIONS[arguments.quantization] if arguments.quantization else None,
        progress=True,
    )
    print(arguments.out)
    return 0
