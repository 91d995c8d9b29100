"""`moerelay up`: a whole cluster on this machine, from checkpoint to `moerelay ready URL`, and down again."""

import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from common.config import UpSettings
from common.cores import pin_process
from common.cpu_list import format_cpus, parse_cpus
from common.errors import STARTUP_EXIT_CODE, StartupError, WorkerLostError
from common.process import host_port
from common.progress import Advance, progress_bar
from common.settings_loader import load_settings
from deploy.core_plan import CorePlan
from deploy.plan import ClusterPlan
from deploy.preflight import checked
from deploy.processes import Child, ProcessGroup, ProcessSpec, StopRequests, race
from deploy.ready import Addresses, read_ready_file, wait_until_ready

#: What a process gets on top of --drain-timeout-s to close its sockets before it is killed.
EXIT_GRACE_S = 5.0
#: Exit code when a second signal cut the drain short.
_FORCED_EXIT_CODE = 1


class LocalCluster:
    """One run of a plan; `group` owns the processes and must outlive it."""

    def __init__(
        self, plan: ClusterPlan, group: ProcessGroup, stdout: TextIO, exit_grace_s: float = EXIT_GRACE_S
    ) -> None:
        self._plan = plan
        self._group = group
        self._stdout = stdout
        self._exit_grace_s = exit_grace_s
        self._workers: list[Child] = []
        self._num_prefill = 0
        self._routers: list[Child] = []
        self._is_ready = False

    async def run(self, stop: StopRequests) -> int:
        """Starts everything, serves until asked to stop, drains; returns the exit code.

        Raises:
            StartupError: a process did not start, or not in time.
            WorkerLostError: a process ended while it should have served, or did not end when asked to.
        """
        try:
            await race(self._fail_on_exit(), self._serve(), stop.first())
        except (StartupError, WorkerLostError):
            await race(self._stop_all(self._exit_grace_s), stop.first())
            raise
        drain_s = self._plan.settings.drain_timeout_s + self._exit_grace_s
        return await race(self._drain(drain_s), self._force(stop))

    async def _serve(self) -> None:
        timeout_s = self._plan.settings.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ready = await self._start()
        except TimeoutError:
            raise StartupError(f"the cluster was not ready after {timeout_s:g} s (--start-timeout-s)") from None
        self._is_ready = True
        print(f"moerelay ready {ready}", file=self._stdout, flush=True)
        await asyncio.Event().wait()  # until another contender of the race ends

    async def _start(self) -> str:
        """Starts everything; returns where the router is: its URL, and after the word "control" that of the control
        port, if there is one.
        """
        prefill, decode = self._plan.prefill_workers(), self._plan.decode_workers()
        with progress_bar("starting", len(prefill) + len(decode) + 1) as advance:
            served = await self._start_all(prefill, decode, advance)
        url = self._url(self._plan.settings.host, served.address)
        if served.control_address is None:
            return url
        return f"{url} control {self._url(self._plan.settings.admin_host, served.control_address)}"

    async def _start_all(
        self, prefill: Sequence[ProcessSpec], decode: Sequence[ProcessSpec], advance: Advance
    ) -> Addresses:
        """Workers, and the router in front of them; returns where it is once /ready says so.

        The router imports while the workers load, and is told their addresses when they serve. `advance` hears of each
        process that does.
        """
        self._num_prefill = len(prefill)
        for spec in [*prefill, *decode]:
            self._workers.append(await self._group.start(spec))
        router = self._plan.router()
        started = await self._group.start(router)
        self._routers.append(started)
        addresses = await self._addresses(prefill, advance), await self._addresses(decode, advance)
        started.send_arguments(self._plan.router_arguments(*addresses))
        served = await read_ready_file(self._plan.ready_file(router.name))
        await wait_until_ready(f"{self._scheme}://{served.address}/ready")
        return served

    async def _addresses(self, specs: Sequence[ProcessSpec], advance: Advance) -> list[str]:
        addresses = []
        for spec in specs:
            addresses.append((await read_ready_file(self._plan.ready_file(spec.name))).address)
            advance(1)
        return addresses

    @property
    def _scheme(self) -> str:
        return "http" if self._plan.settings.ssl_certfile is None else "https"

    def _url(self, host: str, address: str) -> str:
        """With the host that the user chose and the port that was bound."""
        return f"{self._scheme}://{host_port(host, int(address.rpartition(':')[2]))}"

    async def _fail_on_exit(self) -> None:
        while self._is_dispensable(child := await self._group.next_exit()):
            sentence = self._failure(child).message
            print(f"moerelay: warning: {sentence}; the cluster goes on without it", file=sys.stderr, flush=True)
        raise self._failure(child)

    def _is_dispensable(self, child: Child) -> bool:
        """Decode workers take over what a prefill worker did, if they may and it was not started in vain."""
        may_fall_back = self._is_ready and self._plan.settings.allow_aggregated_fallback
        return may_fall_back and child in self._workers[: self._num_prefill]

    def _failure(self, child: Child) -> StartupError | WorkerLostError:
        verb = "died" if self._is_ready else "did not start"
        reason = f": {child.last_line}" if child.last_line else ""
        sentence = f"{child.name} {verb} ({describe_exit(child.exit_code)}){reason}"
        if child.exit_code == STARTUP_EXIT_CODE and not self._is_ready:
            return StartupError(sentence)
        return WorkerLostError(sentence)

    async def _drain(self, grace_s: float) -> int:
        """The router first, so that its live requests still have their workers."""
        late = await self._group.stop(self._routers, grace_s)
        late += await self._group.stop(self._workers, grace_s)
        if late:
            names = ", ".join(child.name for child in late)
            raise WorkerLostError(f"killed {names}: still running {grace_s:g} s after SIGTERM")
        return 0

    async def _stop_all(self, grace_s: float) -> None:
        await self._group.stop([*self._routers, *self._workers], grace_s)

    async def _force(self, stop: StopRequests) -> int:
        await stop.second()
        self._group.kill()
        return _FORCED_EXIT_CODE


def describe_exit(code: int | None) -> str:
    """'exit code 3' or 'killed by SIGKILL'."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


async def launch(settings: UpSettings) -> int:
    """Runs the cluster that `settings` describe, in a private directory, until a signal comes."""
    with tempfile.TemporaryDirectory(prefix="moerelay-") as directory:
        plan = ClusterPlan(settings, Path(directory), text_logs=sys.stderr.isatty())
        take_cores(plan)
        stop = StopRequests()
        stop.listen()
        async with ProcessGroup() as group:
            return await LocalCluster(plan, group, sys.stdout).run(stop)


def take_cores(plan: ClusterPlan) -> None:
    """Keeps this process and all its children on --cpus, and says on stderr which worker gets what of them.

    The router is one of them, and is not pinned: it goes wherever an engine pauses. Workers log their cores themselves;
    the table is for people.

    Raises:
        ConfigError: --cpus or --threads ask for what this process may not use.
    """
    cores = plan.cores()
    if plan.settings.cpus is not None:
        pin_process(parse_cpus(plan.settings.cpus))
    if plan.has_text_logs:
        print(core_table(plan.worker_names, cores), file=sys.stderr, flush=True)
    for warning in cores.warnings:
        print(f"moerelay: warning: {warning}", file=sys.stderr, flush=True)


def core_table(names: Sequence[str], cores: CorePlan) -> str:
    """One line per worker."""
    rows = [("worker", "threads", "cpus")]
    for name, share in zip(names, cores.shares, strict=True):
        rows.append((name, str(share.threads), format_cpus(share.cpus) or "any"))
    width = max(len(name) for name, *_ in rows)
    return "\n".join(f"  {name:<{width}}  {threads:>7}  {cpus}" for name, threads, cpus in rows)


def main(argv: Sequence[str]) -> int:
    settings = load_settings(UpSettings, argv, prog="moerelay up")
    return asyncio.run(launch(checked(settings)))
