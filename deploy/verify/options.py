"""Command line of `moerelay verify`. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.arguments import ArgumentParser
from common.errors import ConfigError
from deploy.arguments import add_api_key_file, first_key, integer, url


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The command line."""

    url: str
    model: str
    requests: int = 200
    concurrency: int = 16
    seed: int = 0
    oracle: str = "solo"
    max_prompt: int = 500
    max_output: int = 64
    dump: Path | None = None
    api_key: str | None = None


def command_line() -> ArgumentParser:
    """The flags of this command."""
    defaults = VerifyOptions(url="", model="")
    parser = ArgumentParser("moerelay verify", "Check a running cluster bit for bit against solo runs computed here.")
    parser.add_argument("--url", type=url, default="http://127.0.0.1:8000", help="the router (default: %(default)s)")
    add_api_key_file(parser)
    parser.add_argument("--model", required=True, help="the checkpoint that the cluster serves")
    for name, minimum, text in (
        ("requests", 1, "number of random requests"),
        ("concurrency", 1, "requests in flight"),
        ("seed", 0, "names the requests: the same seed sends the same ones"),
        ("max-prompt", 1, "longest prompt in tokens"),
        ("max-output", 1, "most tokens to generate"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=integer(minimum), default=default, help=f"{text} (default: {default})")
    parser.add_argument(
        "--oracle",
        choices=("solo", "transformers"),
        default=defaults.oracle,
        help="transformers: also compare expert choices with its fp32 model; counted in fp32, reported in bf16",
    )
    parser.add_argument("--dump", type=Path, help="write digests of every answer, to compare two runs with one seed")
    return parser


def parse_options(argv: Sequence[str]) -> VerifyOptions:
    """Raises ConfigError."""
    arguments = vars(command_line().parse_args(argv))
    options = VerifyOptions(api_key=first_key(arguments.pop("api_key_file")), **arguments)
    # Before the work, not after it.
    if options.dump is not None and not options.dump.absolute().parent.is_dir():
        raise ConfigError(f"--dump {options.dump}: the directory {options.dump.absolute().parent} does not exist")
    return options
