"""`moerelay doctor`: what this machine and installation are, for when something is slow or refused."""

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.arguments import ArgumentParser
from common.errors import ConfigError
from deploy.extras import needs_worker_extra
from deploy.host import Host, this_host
from deploy.keys.inspection import Keys, inspect

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Kernels:
    """One set of kernels."""

    name: str
    #: Why it cannot be used; None: it can.
    unavailable: str | None


@dataclass(frozen=True, slots=True)
class Model:
    """What a worker would compute one checkpoint with."""

    model: str
    family: str
    device: str
    dtype: str
    #: What --kernels auto takes.
    kernels: str
    #: Workers with equal ones compute the same bits.
    numerics: str
    #: All sets, as far as this model is concerned.
    available: tuple[Kernels, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `moerelay doctor` tells."""

    moerelay: str
    python: str
    #: None: not installed.
    torch: str | None
    host: Host
    kernels: tuple[Kernels, ...]
    #: None: no --model was given.
    model: Model | None
    #: None: no --cluster-key-file was given.
    keys: Keys | None = None

    def advice(self) -> Iterator[str]:
        """What could be better, a sentence each."""
        if self.torch is None:
            yield "workers need torch: pip install 'moerelay[worker]'"
        elif all(kernels.unavailable for kernels in self.kernels if kernels.name != "torch"):
            yield "no native kernels here: workers compute with torch, which is slower"
        if self.host.huge_pages == "never":
            yield (
                "huge pages are off, which slows down the reading of weights: "
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
            )
        if self.host.cpu_quota is not None:
            yield f"the cgroup grants {self.host.cpu_quota:g} cpus, fewer than there are: workers are not pinned"
        if self.keys is not None:
            yield from self.keys.advice()


def main(argv: Sequence[str]) -> int:
    """Prints the diagnosis. Raises StartupError if there is a --model or --cluster-key-file that cannot be read."""
    arguments = command_line().parse_args(argv)
    found = diagnose(arguments.model, arguments.dtype, arguments.cluster_key_file)
    print(json.dumps(asdict(found) | {"advice": list(found.advice())}) if arguments.json else "\n".join(_lines(found)))
    return 0


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser("moerelay doctor", "Say what workers would compute with here, and why.")
    parser.add_argument("--model", help="checkpoint directory or hub id: tell what would compute it")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of --model (default: %(default)s)"
    )
    parser.add_argument("--cluster-key-file", type=Path, help="keys of a process: tell what they are, and until when")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def diagnose(model: str | None, dtype: str, key_file: Path | None = None) -> Diagnosis:
    torch_version = _installed("torch")
    if torch_version is None and model is not None:
        raise ConfigError("doctor --model needs the workers' packages: pip install 'moerelay[worker]'")
    with needs_worker_extra("doctor --model"):
        described = None if model is None else _model(model, dtype)
    return Diagnosis(
        moerelay=version("moerelay"),
        python=platform.python_version(),
        torch=torch_version,
        host=this_host(),
        kernels=_no_kernels() if torch_version is None else _kernels(),
        model=described,
        keys=None if key_file is None else inspect(key_file),
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _no_kernels() -> tuple[Kernels, ...]:
    return (Kernels("torch", "torch is not installed"),)


def _kernels() -> tuple[Kernels, ...]:
    from common.model import native  # late: imports torch

    return (*(Kernels(name, native.why_unavailable(name)) for name in native.VARIANTS), Kernels("torch", None))


def _model(name: str, dtype_name: str) -> Model:
    # Late: all of these import torch, or take their time.
    from common.model import native
    from common.model.families import parse_config
    from common.model.hub import resolve_model
    from common.model.kernels.choice import choose_kernels
    from common.model.numerics import numerics_fingerprint, resolve_device, resolve_dtype

    config, device = parse_config(resolve_model(name)), resolve_device("auto")
    dtype, kernels = resolve_dtype(dtype_name, config), choose_kernels("auto", device, config)

    def why_not(variant: str) -> str | None:
        try:
            choose_kernels(variant, device, config)
        except ConfigError as error:
            return error.message.removeprefix(f"--kernels {variant}: ").removesuffix("; use --kernels auto or torch")
        return None

    return Model(
        model=name,
        family=config.family,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        kernels=kernels.name,
        numerics=numerics_fingerprint(device, dtype, kernels),
        available=tuple(Kernels(variant, why_not(variant)) for variant in (*native.VARIANTS, "torch")),
    )


def _lines(found: Diagnosis) -> Iterator[str]:
    host = found.host
    yield f"moerelay {found.moerelay}, Python {found.python}, torch {found.torch or 'not installed'}"
    yield f"processor  {host.processor}"
    yield f"  flags    {' '.join(host.flags) or 'unknown'}"
    quota = "" if host.cpu_quota is None else f", cgroup limit {host.cpu_quota:g}"
    yield f"cores      {host.threads} (cpus {host.cpus}{quota})"
    yield f"memory     {_memory(host)}"
    yield f"huge pages {host.huge_pages or 'unknown'}"
    yield "kernels"
    yield from _kernel_lines(found.kernels if found.model is None else found.model.available)
    if found.model is not None:
        yield f"model      {found.model.model}: {found.model.family}, {found.model.dtype} on {found.model.device}"
        yield f"  auto     {found.model.kernels}"
        yield f"  numerics {found.model.numerics}"
    if found.keys is not None:
        yield f"keys       {found.keys.path}: {found.keys.role}, cluster {found.keys.cluster}"
        yield f"  now      generation {found.keys.generation}, good until {found.keys.expires}"
    yield from (f"advice     {sentence}" for sentence in found.advice())


def _kernel_lines(sets: Sequence[Kernels]) -> Iterator[str]:
    for kernels in sets:
        yield f"  {kernels.name:<12} {'yes' if kernels.unavailable is None else f'no: {kernels.unavailable}'}"


def _memory(host: Host) -> str:
    if host.memory is None or host.memory_available is None:
        return "unknown"
    limit = "" if host.memory_limit is None else f", cgroup limit {host.memory_limit / _GIB:.1f} GiB"
    return f"{host.memory / _GIB:.1f} GiB, of which {host.memory_available / _GIB:.1f} GiB are available{limit}"
