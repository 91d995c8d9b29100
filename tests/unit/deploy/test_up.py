"""The launcher, with stand-ins for the services: what it starts, says, and leaves behind."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.config import UpSettings
from common.cores import Cores
from common.errors import CheckpointError, ConfigError, StartupError, WorkerLostError
from common.model.hub import resolve_model
from common.model.presets import synthetic_config
from deploy.cli import main as command
from deploy.doctor.ports import Wanted
from deploy.plan import ClusterPlan
from deploy.preflight import check_listening, check_router_sockets, with_local_model
from deploy.processes import clean_environment
from deploy.ready import wait_until_ready
from deploy.up import core_table, main, take_cores
from tests.ipv6 import needs_ipv6
from tests.ports import reserved_port
from tests.unit.deploy.conftest import FAKES, REPOSITORY, StartCluster, is_alive

WORKERS = ("prefill-0", "prefill-1", "decode-0")


async def test_ready_line_is_the_only_output_and_a_stop_drains_router_before_workers(
    start_cluster: StartCluster,
) -> None:
    async with start_cluster(prefill=2) as cluster:
        await cluster.ready()
        cluster.stop.request()
        assert await cluster.exit_code == 0
    assert re.fullmatch(r"moerelay ready http://127\.0\.0\.1:[1-9]\d*\n", cluster.stdout.getvalue())
    assert cluster.events("stopping")[0] == "router"
    assert sorted(cluster.events("stopping")) == sorted(["router", *WORKERS])


@needs_ipv6
async def test_ready_line_of_an_ipv6_host_is_a_url(start_cluster: StartCluster) -> None:
    async with start_cluster(host="::1") as cluster:
        await cluster.ready()
    assert re.fullmatch(r"moerelay ready http://\[::1\]:[1-9]\d*\n", cluster.stdout.getvalue())


async def test_ready_line_names_the_control_port_if_there_is_one(start_cluster: StartCluster) -> None:
    async with start_cluster(admin_port=0) as cluster:
        await cluster.ready()
    pattern = r"moerelay ready http://127\.0\.0\.1:([1-9]\d*) control http://127\.0\.0\.1:([1-9]\d*)\n"
    match = re.fullmatch(pattern, cluster.stdout.getvalue())
    assert match, cluster.stdout.getvalue()
    assert match[1] != match[2]


async def test_every_origin_reaches_the_router(start_cluster: StartCluster) -> None:
    origins = ["https://a.example", "http://[::1]:3000", "*"]
    async with start_cluster(cors_origin=origins) as cluster:
        await cluster.ready()
    assert cluster.settings_of("router")["cors_origin"] == origins


@pytest.mark.parametrize(
    "flags", [["--admin-on-public-port"], ["--api-key-file=/missing"], ["--cors-origin=page.example"]]
)
def test_access_that_cannot_be_is_refused_before_anything_starts(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0].partition("=")[0]):
        main(["--model", "m", "--port", "0", *flags])


async def test_an_address_that_is_no_url_is_not_waited_for() -> None:
    with pytest.raises(StartupError, match="http://::1:8000/ready is not a URL"):
        await wait_until_ready("http://::1:8000/ready")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As much of a checkpoint as is read before the workers start."""
    path = tmp_path / "home" / "tiny"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(synthetic_config("qwen3_moe", "tiny", {})))
    return path


def flags_of(settings: UpSettings, tmp_path: Path) -> list[set[str]]:
    """The flags of every process of the plan."""
    plan = ClusterPlan(settings, tmp_path)
    workers = [set(spec.arguments) for spec in [*plan.prefill_workers(), *plan.decode_workers()]]
    return [*workers, set(plan.router_arguments([], []))]


def test_children_get_the_directory_behind_a_hub_id_and_clients_its_name(checkpoint: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def resolve(name: str) -> Path:
        asked.append(name)
        return checkpoint

    *workers, router = flags_of(with_local_model(UpSettings(model="org/tiny-moe"), resolve), tmp_path)
    assert asked == ["org/tiny-moe"]
    assert all(f"--model={checkpoint}" in flags for flags in [*workers, router])
    assert "--served-model-name=org/tiny-moe" in router


def test_children_get_the_directory_behind_a_tilde(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    *workers, router = flags_of(with_local_model(UpSettings(model="~/tiny"), resolve_model), tmp_path)
    assert all(f"--model={checkpoint}" in flags for flags in [*workers, router])
    assert "--served-model-name=tiny" in router


def test_a_given_name_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    settings = UpSettings(model=str(checkpoint), served_model_name="mine")
    *_, router = flags_of(with_local_model(settings, resolve_model), tmp_path)
    assert "--served-model-name=mine" in router


def test_a_model_that_no_worker_would_load_is_refused_before_any_starts(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(CheckpointError, match="llama"):
        with_local_model(UpSettings(model=str(checkpoint)), resolve_model)


async def test_settings_reach_the_services_as_flags(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Children would take it for the router's list of addresses, and fail.
    monkeypatch.setenv("MOERELAY_PREFILL", "1")
    settings = {
        "kv_cache_memory": "2MiB",
        "enable_return_routed_experts": False,
        "threads": 1,
        "dtype": "bfloat16",
        "local_prefill_max_tokens": 32,
        "swap_space": "1MiB",
        "allow_aggregated_fallback": True,
    }
    async with start_cluster(**settings, served_model_name="tiny model", stream_routed_experts="final") as cluster:
        await cluster.ready()
        decode, router = cluster.settings_of("decode-0"), cluster.settings_of("router")
    assert decode["kv_cache_memory"] == 2 * 2**20
    assert (decode["threads"], decode["dtype"], decode["role"]) == (1, "bfloat16", "decode")
    assert decode["enable_return_routed_experts"] is router["enable_return_routed_experts"] is False
    assert decode["handoff_endpoint"].startswith("ipc://")
    assert (decode["local_prefill_max_tokens"], router["allow_aggregated_fallback"]) == (32, True)
    assert decode["swap_space"] == 2**20
    assert (router["served_model_name"], router["stream_routed_experts"]) == ("tiny model", "final")
    assert len(router["prefill"]) == len(router["decode"]) == 1


async def test_aggregated_mode_has_no_prefill_workers(start_cluster: StartCluster) -> None:
    async with start_cluster(mode="aggregated", decode=2) as cluster:
        await cluster.ready()
        assert sorted(cluster.pids()) == ["decode-0", "decode-1", "router"]
        assert cluster.settings_of("decode-1")["role"] == "both"
        assert cluster.settings_of("router")["prefill"] == []


@pytest.mark.parametrize(
    ("fault", "error", "sentence"),
    [
        ("refuse", StartupError, "decode-0 did not start (exit code 2): decode-0: error: this model is not supported"),
        ("crash", WorkerLostError, "decode-0 did not start (exit code 3): ValueError: a bug"),
    ],
)
async def test_process_that_does_not_start_is_named_with_its_last_line(
    start_cluster: StartCluster, fault: str, error: type[Exception], sentence: str
) -> None:
    async with start_cluster(faults={"decode-0": fault}) as cluster:
        with pytest.raises(error) as caught:
            await cluster.exit_code
    assert str(caught.value) == sentence
    assert cluster.stdout.getvalue() == ""
    assert not any(is_alive(pid) for pid in cluster.pids().values())


async def test_process_that_is_never_ready_runs_into_the_start_timeout(start_cluster: StartCluster) -> None:
    async with start_cluster(faults={"prefill-0": "mute"}, start_timeout_s=1.5) as cluster:
        with pytest.raises(StartupError, match=r"not ready after 1\.5 s"):
            await cluster.exit_code


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router"])
async def test_process_that_dies_later_takes_the_cluster_down(start_cluster: StartCluster, name: str) -> None:
    async with start_cluster() as cluster:
        await cluster.ready()
        os.kill(cluster.pids()[name], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=rf"{name} died \(killed by SIGKILL\): {name} logs"):
            await cluster.exit_code
        assert not any(is_alive(pid) for pid in cluster.pids().values())


@pytest.mark.parametrize(("name", "goes_on"), [("prefill-0", True), ("decode-0", False), ("router", False)])
async def test_a_fallback_does_without_prefill_workers_only(
    start_cluster: StartCluster, capsys: pytest.CaptureFixture[str], name: str, goes_on: bool
) -> None:
    async with start_cluster(prefill=2, allow_aggregated_fallback=True) as cluster:
        await cluster.ready()
        pids = cluster.pids()
        os.kill(pids["prefill-1"], signal.SIGKILL)
        os.kill(pids[name], signal.SIGKILL)
        if goes_on:
            told = await told_on_stderr(capsys, f"{name} died")
            assert f"warning: {name} died (killed by SIGKILL): {name} logs; the cluster goes on without it" in told
            assert is_alive(pids["decode-0"])
            cluster.stop.request()
            assert await cluster.exit_code == 0
        else:
            with pytest.raises(WorkerLostError, match=rf"{name} died"):
                await cluster.exit_code
        assert not any(is_alive(pid) for pid in pids.values())


async def told_on_stderr(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """What was written until `text` came."""
    told = ""
    async with asyncio.timeout(60):
        while text not in told:
            told += capsys.readouterr().err
            await asyncio.sleep(0.01)  # a poll: a stream offers nothing to wait on
    return told


async def test_a_prefill_worker_that_does_not_start_ends_a_cluster_that_may_fall_back(
    start_cluster: StartCluster,
) -> None:
    async with start_cluster(faults={"prefill-0": "crash"}, allow_aggregated_fallback=True) as cluster:
        with pytest.raises(WorkerLostError, match="prefill-0 did not start"):
            await cluster.exit_code


async def test_a_router_that_cannot_import_is_named(start_cluster: StartCluster) -> None:
    async with start_cluster(modules=replace(FAKES, router_imports="no_such_module")) as cluster:
        with pytest.raises(WorkerLostError, match=r"router did not start .*No module named 'no_such_module'"):
            await cluster.exit_code


def test_workers_get_their_part_of_the_cores_as_flags(tmp_path: Path) -> None:
    settings = UpSettings(model="m", prefill=1, decode=2, threads="3:1")
    machine = Cores(tuple((cpu,) for cpu in range(6)))
    plan = ClusterPlan(settings, tmp_path, machine=machine)
    specs = [*plan.prefill_workers(), *plan.decode_workers()]
    flags = [[f for f in spec.arguments if f.startswith(("--cpus", "--threads"))] for spec in specs]
    assert flags == [
        ["--threads=3", "--cpus=0-3"],
        ["--threads=1", "--cpus=4"],
        ["--threads=1", "--cpus=5"],
    ]
    assert core_table(plan.worker_names, plan.cores()).splitlines() == [
        "  worker     threads  cpus",
        "  prefill-0        3  0-3",
        "  decode-0         1  4",
        "  decode-1         1  5",
    ]


def test_workers_that_are_not_pinned_get_no_cpus(tmp_path: Path) -> None:
    plan = ClusterPlan(UpSettings(model="m", mode="aggregated"), tmp_path, machine=Cores(((0,), (1,)), can_pin=False))
    [worker] = plan.decode_workers()
    assert "--threads=2" in worker.arguments
    assert not any(flag.startswith("--cpus") for flag in worker.arguments)
    assert core_table(plan.worker_names, plan.cores()).splitlines()[1] == "  decode-0        2  any"


def test_cpus_that_are_not_there_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cpus 60000"):
        take_cores(ClusterPlan(UpSettings(model="m", cpus="60000"), tmp_path))


async def test_second_request_to_stop_forces(start_cluster: StartCluster) -> None:
    async with start_cluster(faults={"router": "deaf"}) as cluster:
        await cluster.ready()
        cluster.stop.request()
        cluster.stop.request()
        assert await cluster.exit_code == 1
    assert not any(is_alive(pid) for pid in cluster.pids().values())


async def test_stop_while_starting_ends_cleanly(start_cluster: StartCluster) -> None:
    async with start_cluster(faults={"prefill-0": "mute"}) as cluster:
        cluster.stop.request()
        assert await cluster.exit_code == 0
    assert cluster.stdout.getvalue() == ""


async def test_process_that_ignores_sigterm_is_killed_and_named(start_cluster: StartCluster) -> None:
    async with start_cluster(faults={"decode-0": "deaf"}, drain_timeout_s=0.1) as cluster:
        await cluster.ready()
        cluster.stop.request()
        with pytest.raises(WorkerLostError, match=r"killed decode-0: still running"):
            await cluster.exit_code


LAUNCHER = """
import asyncio, sys
from deploy import up
from deploy.plan import ClusterPlan
from tests.unit.deploy.conftest import FAKES
up.ClusterPlan = lambda settings, directory, text_logs: ClusterPlan(settings, directory, FAKES, text_logs)
from common.config import UpSettings
sys.exit(asyncio.run(up.launch(UpSettings(model="m", port=0))))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "FAKE_JOURNAL": str(tmp_path / "journal")}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_drain_and_stderr_of_children_passes_through(
    launcher: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert launcher.stdout is not None
    with launcher:
        ready = launcher.stdout.readline()
        launcher.send_signal(number)
        rest, stderr = launcher.communicate(timeout=60)
    assert ready.startswith("moerelay ready http://")
    assert (launcher.returncode, rest) == (0, "")
    for name in ("prefill-0", "decode-0", "router"):
        assert f"{name} logs" in stderr
        assert f"{name} prints on stdout" in stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a parent that was killed")
def test_killed_launcher_leaves_no_process(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    assert launcher.stdout is not None
    with launcher:
        launcher.stdout.readline()
        launcher.kill()
        # Every child holds the write ends of both pipes, so end of file means that all of them are gone.
        launcher.communicate(timeout=60)
    started = [line.split() for line in (tmp_path / "journal").read_text().splitlines() if " started " in line]
    assert sorted(name for name, _, _ in started) == ["decode-0", "prefill-0", "router"]


def test_children_do_not_see_our_variables() -> None:
    assert clean_environment({"MOERELAY_PORT": "1", "moerelay_host": "h", "PATH": "p"}) == {"PATH": "p"}


@pytest.mark.parametrize(
    ("length", "router_processes", "fits"),
    # /moerelay-router-xxxxxxxx/1.sock has 32 bytes, with process 10 one more.
    [(71, 2, True), (72, 2, False), (71, 11, False), (72, 1, True)],
)
def test_router_processes_whose_sockets_have_no_room_are_refused(
    length: int, router_processes: int, fits: bool
) -> None:
    temporary = Path("/" + "t" * (length - 1))
    if fits:
        check_router_sockets(router_processes, temporary)
        return
    with pytest.raises(ConfigError, match=r"--router-processes .*longer than 103 bytes; set TMPDIR"):
        check_router_sockets(router_processes, temporary)


@pytest.mark.parametrize(("router_processes", "imported"), [(1, "router.server"), (2, "router.processes.parent")])
def test_the_parent_of_router_processes_imports_no_server(tmp_path: Path, router_processes: int, imported: str) -> None:
    plan = ClusterPlan(UpSettings(model="m", router_processes=router_processes), tmp_path)
    assert plan.router().imported == imported
    code = f"import sys, {imported}; sys.exit(('router.server' in sys.modules) != {router_processes == 1})"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_a_port_that_cannot_be_is_refused_before_anything_starts() -> None:
    with reserved_port() as port:
        check_listening(UpSettings(model="m", port=port))
        taken = pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1:{port} is taken by .*choose another --port \(0: a free"
        )
        with socket.create_server(("127.0.0.1", port)), taken:
            check_listening(UpSettings(model="m", port=port))
    check_listening(UpSettings(model="m", port=0, admin_port=0))
    # 203.0.113.0/24 is for documentation (RFC 5737).
    for host, flag in (("host", "--host"), ("admin_host", "--admin-host")):
        settings = UpSettings.model_validate({"model": "m", "port": 0, "admin_port": 0, host: "203.0.113.1"})
        with pytest.raises(ConfigError, match=rf"203\.0\.113\.1:0: .* or {flag}$"):
            check_listening(settings)


@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")])
def test_a_port_cannot_be_the_control_port_too(hosts: tuple[str, str]) -> None:
    host, admin_host = hosts
    with reserved_port() as port:
        settings = UpSettings(model="m", host=host, port=port, admin_host=admin_host, admin_port=port)
        message = rf"{admin_host}:{port} is wanted by --port and by --admin-port; change one"
        with pytest.raises(ConfigError, match=message):
            check_listening(settings)
        # Each address has ports of its own.
        check_listening(settings.model_copy(update={"host": "127.0.0.1", "admin_host": "127.0.0.2"}))


@pytest.mark.parametrize(
    ("hosts", "excluded"),
    [
        (("localhost", "127.0.0.1"), True),
        (("::", "::1"), True),
        (("::", "127.0.0.1"), False),
        (("0.0.0.0", "::"), False),
        (("::1", "::"), True),
    ],
)
def test_wildcards_stand_for_addresses_of_their_own_family(hosts: tuple[str, str], excluded: bool) -> None:
    one, other = (Wanted("--port", host, 8000) for host in hosts)
    assert one.excludes(other) is other.excludes(one) is excluded


def with_model(checkpoint: Path, **settings: object) -> UpSettings:
    return with_local_model(UpSettings.model_validate({"model": str(checkpoint), **settings}), resolve_model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_model_len": 10**6}, r"^--max-model-len 1000000 exceeds the (\d+) positions .*; give at most \1$"),
        (
            {"max_model_len": 65, "num_kv_blocks": 4},
            "^--max-model-len 65 exceeds the 64 tokens that the KV cache holds; lower it, or raise --kv-cache-memory ",
        ),
        (
            {"kv_cache_memory": 1000},
            r"^--kv-cache-memory of 1000 bytes holds fewer than 2 blocks .*; give at least \d",
        ),
    ],
    ids=["positions", "blocks", "memory"],
)
def test_a_context_that_does_not_fit_is_refused_before_anything_starts(
    checkpoint: Path, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        with_model(checkpoint, **settings)


def test_a_context_that_just_fits(checkpoint: Path) -> None:
    longest = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    with_model(checkpoint, max_model_len=longest)
    with pytest.raises(ConfigError, match=f"at most {longest}$"):
        with_model(checkpoint, max_model_len=longest + 1)
    with_model(checkpoint, max_model_len=64, num_kv_blocks=4)


def test_a_dtype_that_is_not_computed_is_refused_before_anything_starts(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch_dtype": "float16", "dtype": "float16"}))
    with pytest.raises(ConfigError, match=r"declares dtype float16, .*; choose --dtype float32 or bfloat16$"):
        with_model(checkpoint)
    with_model(checkpoint, dtype="bfloat16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["up", "--model", str(checkpoint), "--port", "0", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "moerelay: error: --device cuda: torch finds no CUDA device here; use --device cpu\n"
    )


def test_what_is_looked_at_first_needs_no_torch(checkpoint: Path) -> None:
    """It takes a second, and its memory as long as the cluster runs."""
    code = (
        "import sys, deploy.up; from common.config import UpSettings; from deploy.preflight import checked; "
        "checked(UpSettings(model=sys.argv[1], port=0)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(checkpoint)], cwd=REPOSITORY, check=False).returncode == 0
