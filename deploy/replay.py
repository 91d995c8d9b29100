"""`moerelay replay`: computes a request again that a worker's self-check has kept, and says who was right."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.arguments import ArgumentParser
from common.config import LogSettings
from common.log import configure_logging
from common.progress import progress_bar
from common.settings_loader import load_settings
from deploy.extras import needs_worker_extra

if TYPE_CHECKING:
    from decode_worker.self_check.reproducer import PackedTold, Reproducer
    from decode_worker.self_check.told import Told


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser(
        "moerelay replay", "Compute a request again that differed from its solo run, from a file of --self-check-dir."
    )
    parser.add_argument("file", type=Path, help="self-check-….json")
    parser.add_argument("--model", required=True, help="the checkpoint that was served: directory or hub id")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 1 if what was served differs from the solo run here. Raises StartupError."""
    arguments = command_line().parse_args(argv)
    configure_logging(load_settings(LogSettings, [], prog="moerelay replay"), process="replay")
    lines, is_equal = replay(arguments.file, arguments.model)
    print(*lines, sep="\n")
    return 0 if is_equal else 1


def replay(file: Path, model: str) -> tuple[list[str], bool]:
    """What is to be said, and whether what was served is right. Raises StartupError."""
    with needs_worker_extra("replay"):
        from decode_worker.self_check.reproducer import read_reproducer

        kept = read_reproducer(file)
        solo = run_again(kept, model)
    lines, is_equal = _verdict(kept, solo)
    return [*_heading(kept), *lines], is_equal


def run_again(kept: "Reproducer", model: str) -> "Told":
    """A solo run in this process, its prompt in one piece.

    Raises:
        ConfigError: the checkpoint is another one, or this machine computes other bits.
    """
    from common.engine.grammar import GrammarCompiler
    from common.model.families import parse_config
    from common.model.hub import resolve_model
    from decode_worker.self_check.told import Told
    from deploy.verify.solo_oracle import Served, load_solo

    path = resolve_model(model)
    config = parse_config(path)
    num_positions = len(kept.prompt) + kept.sampling.max_tokens
    served = Served(num_positions, kept.numerics, kept.fingerprint, kept.weight_version)
    runner, _ = load_solo(path, config, served, num_positions)
    matcher = None
    if kept.sampling.grammar is not None:
        compiler = GrammarCompiler(path / "tokenizer.json", config.vocab_size, config.eos_token_ids)
        matcher = compiler.compile(kept.sampling.grammar)
    with progress_bar("replay", None):  # where it ends, the run itself finds out
        result = runner.run(kept.prompt, kept.sampling, kept.routing_start, choice=kept.choice, matcher=matcher)
    return Told.of(result)


def _heading(kept: "Reproducer") -> Iterator[str]:
    yield (
        f"request {kept.request_id}, choice {kept.choice}: {len(kept.prompt)} prompt tokens, "
        f"{len(kept.served.tokens)} generated"
    )
    found = ", ".join(f"{kind} at position {position}" for kind, position in kept.differences.items())
    yield f"found {kept.found_at} with weights {kept.weight_version}: {found}"


def _verdict(kept: "Reproducer", solo: "Told") -> tuple[list[str], bool]:
    """What the solo run here says of both, and whether what was served is right."""
    differences = _differences(kept, kept.served, solo)
    lines = [f"what was served: {differences or 'equal'}"]
    if kept.solo is None:
        lines.append(f"the worker's solo run: {kept.solo_error}")
    else:
        lines.append(f"the worker's solo run: {_differences(kept, kept.solo, solo) or 'equal'}")
    return lines, not differences


def _differences(kept: "Reproducer", packed: "PackedTold", solo: "Told") -> str:
    from decode_worker.self_check.told import compare

    found = compare(packed.unpack(kept.num_top), solo, len(kept.prompt), kept.routing_start)
    return ", ".join(f"{kind} differ at position {position}" for kind, position in found.items())
