"""Which processes make up a local cluster, and with which flags: UpSettings in, process specs out."""

import os
from dataclasses import dataclass
from pathlib import Path

from common.config import DecodeSettings, LogSettings, PrefillSettings, RouterSettings, UpSettings, WorkerSettings
from common.cores import Cores, usable_cores
from common.cpu_list import format_cpus
from common.process import MAX_SOCKET_PATH_BYTES
from deploy.core_plan import CorePlan, Share, plan_cores
from deploy.processes import ProcessSpec

#: Settings of `up` that name something else in the services, or that the plan decides.
_WORKER_OWN = {"host", "port", "log_format", "cpus", "threads"}
_ROUTER_OWN = {"prefill", "decode", "log_format"}


@dataclass(frozen=True, slots=True)
class Modules:
    """Which module each kind of process runs."""

    prefill: str = "prefill_worker"
    decode: str = "decode_worker"
    router: str = "router"
    #: What the router imports while the workers load.
    router_imports: str = "router.server"
    #: The same if it is to be the parent of several processes, and so serves nothing itself.
    router_parent_imports: str = "router.processes.parent"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`directory` is private to one run: ready files and handoff sockets lie there."""

    settings: UpSettings
    directory: Path
    modules: Modules = Modules()
    text_logs: bool = False
    #: By default what --cpus and this machine allow.
    machine: Cores | None = None

    def ready_file(self, name: str) -> Path:
        """Where the process of that name says that it serves."""
        return self.directory / f"{name}.ready"

    def prefill_workers(self) -> list[ProcessSpec]:
        """None in aggregated mode, where each decode worker prefills for itself."""
        prefill = range(self._num_prefill)
        return [self._worker(PrefillSettings, f"prefill-{i}", self.modules.prefill, []) for i in prefill]

    def decode_workers(self) -> list[ProcessSpec]:
        role = "both" if self.settings.mode == "aggregated" else "decode"
        specs = []
        for i in range(self.settings.decode):
            flags = [f"--role={role}"]
            socket = self.directory / f"handoff-{i}"
            if role == "decode" and len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:
                flags.append(f"--handoff-endpoint=ipc://{socket}")
            specs.append(self._worker(DecodeSettings, f"decode-{i}", self.modules.decode, flags))
        return specs

    def router(self) -> ProcessSpec:
        """Its arguments are those of `router_arguments`, once there are addresses."""
        several = self.settings.router_processes > 1
        imported = self.modules.router_parent_imports if several else self.modules.router_imports
        return ProcessSpec("router", self.modules.router, (), imported=imported)

    def router_arguments(self, prefill: list[str], decode: list[str]) -> list[str]:
        """`prefill` and `decode` are the addresses that the workers reported."""
        return [
            *shared_flags(self.settings, RouterSettings, _ROUTER_OWN),
            self._log_format(),
            f"--ready-file={self.ready_file('router')}",
            *(f"--prefill={address}" for address in prefill),
            *(f"--decode={address}" for address in decode),
        ]

    def cores(self) -> CorePlan:
        """How the cores are split, in the order of `worker_names`.

        Raises:
            ConfigError: --cpus or --threads ask for what this process may not use.
        """
        machine = self.machine or usable_cores(self.settings.cpus)
        prefill = [self.settings.prefill_threads] * self._num_prefill
        return plan_cores(machine, [*prefill, *[self.settings.decode_threads] * self.settings.decode])

    @property
    def worker_names(self) -> list[str]:
        """Prefill workers, then decode workers."""
        return [f"prefill-{i}" for i in range(self._num_prefill)] + [f"decode-{i}" for i in range(self.settings.decode)]

    @property
    def has_text_logs(self) -> bool:
        """What is written is for a person. Children write into a pipe, so "auto" is decided here."""
        return self.text_logs if self.settings.log_format == "auto" else self.settings.log_format == "text"

    @property
    def _num_prefill(self) -> int:
        return 0 if self.settings.mode == "aggregated" else self.settings.prefill

    def _share(self, name: str) -> Share:
        return self.cores().shares[self.worker_names.index(name)]

    def _worker(self, cls: type[WorkerSettings], name: str, module: str, extra: list[str]) -> ProcessSpec:
        share = self._share(name)
        flags = [
            *shared_flags(self.settings, cls, _WORKER_OWN),
            self._log_format(),
            f"--threads={share.threads}",
            *([f"--cpus={format_cpus(share.cpus)}"] if share.cpus else []),
            f"--worker-id={name}",
            f"--ready-file={self.ready_file(name)}",
            "--port=0",
        ]
        return ProcessSpec(name, module, (*flags, *extra))

    def _log_format(self) -> str:
        return f"--log-format={'text' if self.has_text_logs else 'json'}"


def shared_flags(settings: UpSettings, cls: type[LogSettings], own: set[str]) -> list[str]:
    """Flags for every setting that `up` and the service have in common, those in `own` excepted."""
    names = [name for name in cls.model_fields if name in type(settings).model_fields and name not in own]
    return [flag for name in names for flag in _flag(name, getattr(settings, name))]


def _flag(name: str, value: object) -> list[str]:
    dashed = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    if isinstance(value, list):
        return [f"--{dashed}={each}" for each in value]
    return [f"--{dashed}={value}"]
