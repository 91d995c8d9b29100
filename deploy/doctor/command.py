"""`moerelay doctor`: a line per thing that must be right before something is started here."""

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.text import Text

from common.arguments import ArgumentParser
from deploy.arguments import integer, port, size
from deploy.doctor.check import Check, Verdict
from deploy.doctor.checkpoint import Model, Use, examine
from deploy.doctor.keys import Keys, inspect, inspect_list, inspect_tls
from deploy.doctor.machine import Kernels, all_kernels, check_kernels, check_machine, check_torch
from deploy.doctor.ports import Wanted, check_ports
from deploy.extras import needs_worker_extra
from deploy.host import Host, this_host
from deploy.terminal import stdout

_STYLES: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "bad": "red"}


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be started on this machine; None and empty: nothing of the kind is asked about."""

    ports: tuple[Wanted, ...] = ()
    model: str | None = None
    use: Use = field(default_factory=Use)
    cluster_key_file: Path | None = None
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `moerelay doctor` tells: facts for programs, and what they amount to."""

    moerelay: str
    python: str
    #: None: not installed.
    torch: str | None
    host: Host
    kernels: tuple[Kernels, ...]
    #: None: no --model was given, or it cannot be read.
    model: Model | None
    #: None: no --cluster-key-file was given, or it cannot be read.
    keys: Keys | None
    checks: tuple[Check, ...]

    @property
    def is_good(self) -> bool:
        """Whether everything that was asked about would start."""
        return all(check.verdict != "bad" for check in self.checks)


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser("moerelay doctor", "Say whether this machine is ready for what is to be started on it.")
    checkpoint = parser.add_argument_group("checkpoint")
    checkpoint.add_argument("--model", help="checkpoint directory or hub id: whether workers here could load it")
    checkpoint.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of --model (default: %(default)s)"
    )
    checkpoint.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="of --model (default: %(default)s)"
    )
    checkpoint.add_argument("--max-model-len", type=integer(2), help="of --model; default: what the checkpoint allows")
    checkpoint.add_argument("--workers", type=integer(1), default=2, help="with --model on this machine (default: 2)")
    checkpoint.add_argument("--kv-cache-memory", type=size, default=2**30, help="of each worker (default: 1GiB)")
    ports = parser.add_argument_group("ports")
    ports.add_argument("--host", default="127.0.0.1", help="where all ports are (default: %(default)s)")
    ports.add_argument("--port", type=port, default=8000, help="the router's HTTP port (default: %(default)s)")
    ports.add_argument("--admin-port", type=port, help="the router's control port")
    ports.add_argument("--worker-port", type=port, action="append", help="a worker's gRPC port; repeatable")
    ports.add_argument("--handoff-port", type=port, action="append", help="a decode worker's; repeatable")
    keys = parser.add_argument_group("keys and certificates")
    keys.add_argument("--cluster-key-file", type=Path, help="keys of a process: whether they fit, and until when")
    keys.add_argument("--api-key-file", type=Path, help="keys of clients")
    keys.add_argument("--admin-key-file", type=Path, help="keys of administrators")
    keys.add_argument("--ssl-certfile", type=Path, help="what clients are shown")
    keys.add_argument("--ssl-keyfile", type=Path, help="its private key; default: it is in --ssl-certfile, too")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints the diagnosis. Exit code 1 if something that was asked about would not start."""
    arguments = command_line().parse_args(argv)
    found = diagnose(
        Question(
            tuple(_ports(arguments.host, vars(arguments))),
            arguments.model,
            Use(
                arguments.dtype,
                arguments.workers,
                arguments.kv_cache_memory,
                arguments.device,
                arguments.max_model_len,
            ),
            arguments.cluster_key_file,
            arguments.api_key_file,
            arguments.admin_key_file,
            arguments.ssl_certfile,
            arguments.ssl_keyfile,
        )
    )
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        console = stdout()
        for check in found.checks:
            console.print(line(check))
    return 0 if found.is_good else 1


def _ports(host: str, given: dict[str, int | list[int] | None]) -> Iterator[Wanted]:
    """By default workers take free ports, for gRPC and for handoffs."""
    for name, default in (("port", None), ("admin_port", None), ("worker_port", 0), ("handoff_port", 0)):
        value = default if given[name] is None else given[name]
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            yield Wanted(f"--{name.replace('_', '-')}", host, each)


def diagnose(question: Question) -> Diagnosis:
    """Raises ConfigError if a package is missing that --model needs."""
    torch, host = _installed("torch"), this_host()
    kernels = (Kernels("torch", "torch is not installed"),) if torch is None else all_kernels()
    model, of_model, keys, of_keys = None, list[Check](), None, list[Check]()
    if question.model is not None:
        with needs_worker_extra("doctor --model"):
            model, of_model = examine(question.model, question.use, host)
    if question.cluster_key_file is not None:
        keys, of_keys = inspect(question.cluster_key_file)
    if question.api_key_file is not None:
        of_keys += inspect_list(question.api_key_file, "--api-key-file")
    if question.admin_key_file is not None:
        of_keys += inspect_list(question.admin_key_file, "--admin-key-file")
    if question.ssl_certfile is not None:
        of_keys += inspect_tls(question.ssl_certfile, question.ssl_keyfile)
    return Diagnosis(
        moerelay=version("moerelay"),
        python=platform.python_version(),
        torch=torch,
        host=host,
        kernels=kernels,
        model=model,
        keys=keys,
        checks=(
            Check("moerelay", "ok", f"{version('moerelay')}, Python {platform.python_version()}"),
            check_torch(torch),
            *check_machine(host),
            *check_kernels(kernels if model is None else model.available),
            *check_ports(question.ports),
            *of_model,
            *of_keys,
        ),
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def line(check: Check) -> Text:
    """The verdict, what was looked at, what was found, and the fix."""
    return Text.assemble((f"{check.verdict:<6}", _STYLES[check.verdict]), f"{check.name:<11} ", check.told.rstrip())
