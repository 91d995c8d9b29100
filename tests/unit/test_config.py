"""Settings: order of the sources, strictness, and refusals that name the flag."""

import re
from pathlib import Path

import pytest

from common.config import DecodeSettings, LogSettings, PrefillSettings, RouterSettings, UpSettings, is_loopback
from common.errors import ConfigError
from common.setting_groups import GROUPS
from common.settings_loader import SETTINGS, load_settings, settings_parser


def test_toml_then_environment_then_command_line(tmp_path: Path) -> None:
    toml = tmp_path / "worker.toml"
    toml.write_text('model = "from-file"\nblock_size = 32\nmax_num_seqs = 3\n')
    environ = {"MOERELAY_BLOCK_SIZE": "64", "MOERELAY_MAX_NUM_SEQS": "4"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        settings = load_settings(PrefillSettings, ["--config", str(toml), "--max-num-seqs", "5"], prog="p")
    assert (settings.model, settings.block_size, settings.max_num_seqs) == ("from-file", 64, 5)


def test_the_file_may_follow_an_equals_sign(tmp_path: Path) -> None:
    toml = tmp_path / "router.toml"
    toml.write_text("max_n = 7\n")
    assert load_settings(RouterSettings, [f"--config={toml}", "--port=1"], prog="p", environ={}).max_n == 7


def sections(page: str) -> dict[str, list[str]]:
    """Of a page of --help: heading → the flags below it."""
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        if heading := re.fullmatch(r"(\S.*):", line):
            flags = found[heading[1]] = []
        elif flag := re.match(r"  (?:-h, )?(--[a-z-]+)", line):
            flags.append(flag[1])
    return found


@pytest.mark.parametrize("cls", SETTINGS)
def test_help_lists_every_setting_once_under_a_heading(cls: type[LogSettings]) -> None:
    found = sections(settings_parser(cls, "p").format_help())
    assert found.pop("options") == ["--help", "--config"]
    flags = [flag for listed in found.values() for flag in listed]
    assert sorted(flags) == sorted(f"--{name.replace('_', '-')}" for name in cls.model_fields)
    assert all(found.values())
    assert max(map(len, found.values())) < 20


def test_help_begins_with_what_a_cluster_consists_of() -> None:
    page = settings_parser(UpSettings, "moerelay up").format_help()
    assert page.startswith("usage: moerelay up --model MODEL [FLAG …]\n\nStart a whole cluster ")
    found = sections(page)
    assert list(found)[:3] == ["options", "cluster", "model"]
    assert found["cluster"][:3] == ["--prefill", "--decode", "--mode"]
    assert "--port" in found["ports and addresses"]
    assert {"--api-key-file", "--ssl-certfile", "--insecure"} <= set(found["security"])
    assert "None" not in page


def test_no_setting_that_there_is_not_has_a_heading() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted({name for cls in SETTINGS for name in cls.model_fields})


def test_help_lists_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(RouterSettings, ["--help"], prog="p", environ={})
    assert "\n  --config FILE.toml " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "m", "--block-size", "3"], "--block-size"),
        (["--model", "m", "--kv-cache-memory", "1GiB", "--num-kv-blocks", "9"], "exclude each other"),
        (["--model", "m", "--kv-cache-memory", "1 parsec"], "--kv-cache-memory"),
        (["--model", "m", "--kv-cache-memory", "inf"], "--kv-cache-memory: 'inf' is not a size"),
        (["--model", "m", "--kv-cache-memory", "GiB"], "--kv-cache-memory: 'GiB' is not a size"),
        (["--model", "m", "--kv-cache-memory", "9" * 5000], "--kv-cache-memory"),
        (["--model", "m", "--kv-cache-memory", "-1GiB"], "--kv-cache-memory"),
        (["--model", "m", "--tensor-parallel-size", "2"], "--tensor-parallel-size must be 1: .* not supported yet"),
        (["--model", "m", "--pipeline-parallel-size", "2"], "--pipeline-parallel-size must be 1: routing rows cannot"),
        (["--model", "m", "--prefill-context-parallel-size", "4"], "--prefill-context-parallel-size"),
        (["--model", "m", "--handoff-timeout-s", "nan"], "--handoff-timeout-s"),
        (["--model", "m", "--role", "both", "--local-prefill-max-tokens", "1"], "--local-prefill-max-tokens .*--role"),
        ([], "--model"),
        (["--config"], "--config"),
        (["--config", "/no/such/file.toml"], "--config"),
        (["--config=/no/such/file.toml"], "--config /no/such/file.toml: "),
    ],
)
def test_refusals_name_the_flag(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(DecodeSettings, argv, prog="p", environ={})


def test_a_switch_in_a_file_or_variable_is_true_or_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = tmp_path / "router.toml"
    toml.write_text('insecure = "maybe"\n')
    said = "^--insecure maybe: must be true or false, e.g. MOERELAY_INSECURE=false$"
    with pytest.raises(ConfigError, match=said):
        load_settings(RouterSettings, ["--config", str(toml)], prog="p", environ={})
    monkeypatch.setenv("MOERELAY_INSECURE", "maybe")
    with pytest.raises(ConfigError, match=said):
        load_settings(RouterSettings, [], prog="p")
    monkeypatch.setenv("MOERELAY_INSECURE", "true")
    assert load_settings(RouterSettings, [], prog="p").insecure


def test_unknown_variables_and_keys_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MOERELAY_BLOK_SIZE; did you mean MOERELAY_BLOCK_SIZE\?$"):
        load_settings(RouterSettings, [], prog="p", environ={"MOERELAY_BLOK_SIZE": "1", "HOME": "/"})
    toml = tmp_path / "router.toml"
    toml.write_text("blok_size = 1\n")
    with pytest.raises(ConfigError, match="blok-size: unknown"):
        load_settings(RouterSettings, ["--config", str(toml)], prog="p", environ={})


def test_a_variable_of_another_process_is_no_error() -> None:
    assert load_settings(RouterSettings, [], prog="p", environ={"MOERELAY_MODE": "aggregated"}).port == 8000


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 2**30), ("1.5 MiB", 3 * 2**19), ("2kb", 2000), ("4096", 4096), ("0.5GiB", 2**29)]
)
def test_sizes(text: str, size: int) -> None:
    settings = load_settings(UpSettings, ["--model", "m", "--kv-cache-memory", text], prog="p", environ={})
    assert settings.kv_cache_memory == size


def test_worker_lists() -> None:
    argv = ["--prefill", "a:1", "--prefill", "b:2", "--decode", "c:3,d:4"]
    settings = load_settings(RouterSettings, argv, prog="p", environ={})
    assert (settings.prefill, settings.decode) == (["a:1", "b:2"], ["c:3", "d:4"])
    with pytest.raises(ConfigError, match="HOST:PORT"):
        load_settings(RouterSettings, ["--decode", "no-port"], prog="p", environ={})


def test_worker_lists_in_a_variable_and_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOERELAY_PREFILL", "a:1,[::1]:2")
    toml = tmp_path / "router.toml"
    toml.write_text('decode = ["c:3", "[::1]:4"]\n')
    settings = load_settings(RouterSettings, ["--config", str(toml)], prog="p")
    assert (settings.prefill, settings.decode) == (["a:1", "[::1]:2"], ["c:3", "[::1]:4"])


def test_an_ipv6_address_needs_brackets() -> None:
    argv = ["--prefill", "[::1]:7000", "--prefill", "[::2]:1,a:2"]
    assert load_settings(RouterSettings, argv, prog="p", environ={}).prefill == ["[::1]:7000", "[::2]:1", "a:2"]
    with pytest.raises(ConfigError, match=r"write \[::1\]:7000"):
        load_settings(RouterSettings, ["--prefill", "::1:7000"], prog="p", environ={})


def test_disaggregated_needs_prefill() -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        load_settings(UpSettings, ["--model", "m", "--prefill", "0"], prog="p", environ={})


@pytest.mark.parametrize("flag", ["--allow-aggregated-fallback", "--local-prefill-max-tokens=16"])
def test_flags_that_aggregated_mode_would_ignore(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"no effect with --mode aggregated.* leave out {flag.partition('=')[0]}$"):
        load_settings(UpSettings, ["--model", "m", "--mode", "aggregated", flag], prog="p", environ={})
    load_settings(UpSettings, ["--model", "m", flag], prog="p", environ={})


def test_a_prefill_worker_preempts_nobody() -> None:
    argv = ["--model", "m", "--swap-space", "1GiB"]
    assert load_settings(DecodeSettings, argv, prog="p", environ={}).swap_space == 2**30
    with pytest.raises(ConfigError, match="--swap-space"):
        load_settings(PrefillSettings, argv, prog="p", environ={})
    load_settings(PrefillSettings, argv[:2], prog="p", environ={"MOERELAY_SWAP_SPACE": "1GiB"})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("worker", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_up_knows_every_setting_of_what_it_starts() -> None:
    """A variable that `up` accepts and no process gets would be silently ignored."""
    decided_by_up = {"worker_id", "advertise_address", "ready_file", "role", "handoff_endpoint"}
    # Its processes are where it starts them, and out of reach of other machines.
    decided_by_up |= {"discovery_interval_s", "cluster_key_file"}
    for cls in (PrefillSettings, DecodeSettings, RouterSettings):
        assert cls.model_fields.keys() - UpSettings.model_fields.keys() <= decided_by_up


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "http://127.0.0.1:7001",
            r"is no list of workers; write HOST:PORT, dns://HOST:PORT, srv://NAME or file://PATH",
        ),
        ("p0.example", r"'p0\.example' is not HOST:PORT"),
        ("dns://prefill", r"'prefill' is not HOST:PORT"),
        ("dns://http://prefill:7001", "is a URL"),
        ("srv://", "lacks a name of SRV records after srv://"),
        ("srv://decode:7002", "lacks a name of SRV records after srv://"),
        ("file://", "lacks a path after file://"),
    ],
)
def test_what_lists_no_workers_is_refused(source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--prefill: .*{said}"):
        load_settings(RouterSettings, ["--prefill", source], prog="p", environ={})


def test_sources_of_workers_may_be_mixed() -> None:
    sources = ["p0:7001", "[fd00::1]:7001", "dns://prefill:7001", "srv://_grpc._tcp.prefill.example", "file:///run/p"]
    argv = ["--prefill", ",".join(sources[:3]), "--prefill", sources[3], "--prefill", sources[4]]
    assert load_settings(RouterSettings, argv, prog="p", environ={}).prefill == sources


@pytest.mark.parametrize(("threads", "counts"), [("4", (4, 4)), ("6:2", (6, 2)), (3, (3, 3)), (None, (None, None))])
def test_threads_are_for_all_workers_or_for_each_role(
    threads: str | int | None, counts: tuple[int | None, int | None]
) -> None:
    settings = UpSettings.model_validate({"model": "m", "threads": threads})
    assert (settings.prefill_threads, settings.decode_threads) == counts


@pytest.mark.parametrize("threads", ["0", "-1", "6:", ":2", "1:2:3", "many", "2:0", 0])
def test_what_is_no_number_of_threads_is_refused(threads: str | int) -> None:
    with pytest.raises(ConfigError, match=r"--threads: .* is neither a number of threads nor two, PREFILL:DECODE"):
        load_settings(UpSettings, ["--model", "m", "--threads", str(threads)], prog="up", environ={})


def test_threads_of_prefill_workers_need_some() -> None:
    with pytest.raises(ConfigError, match="--threads 6:2: there are no prefill workers with --mode aggregated"):
        load_settings(UpSettings, ["--model", "m", "--mode", "aggregated", "--threads", "6:2"], prog="up", environ={})


def test_cpus_are_normalised_and_wrong_ones_refused() -> None:
    settings = load_settings(UpSettings, ["--model", "m", "--cpus", "8,0-1,2"], prog="up", environ={})
    assert settings.cpus == "0-2,8"
    with pytest.raises(ConfigError, match="--cpus: '0-3-5' is not a list of cpus"):
        load_settings(UpSettings, ["--model", "m", "--cpus", "0-3-5"], prog="up", environ={})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50ms", 0.05), ("2s", 2.0), ("0.05", 0.05), ("1.5 s", 1.5), ("1e-05", 1e-5), (".5ms", 0.0005)],
)
def test_objectives_are_written_with_or_without_a_unit(text: str, seconds: float) -> None:
    settings = load_settings(UpSettings, ["--model", "m", "--slo-itl", text], prog="p", environ={})
    assert settings.slo_itl == pytest.approx(seconds)
    assert settings.slo_ttft is None


@pytest.mark.parametrize("text", ["0", "-1", "0ms", "fast", "inf", "nan", "5m"])
def test_what_is_no_objective(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo-ttft"):
        load_settings(UpSettings, ["--model", "m", f"--slo-ttft={text}"], prog="p", environ={})
