"""What does not start beyond this machine without keys, and which flag each refusal names."""

from pathlib import Path

import pytest

from common.config import DecodeSettings, PrefillSettings, RouterSettings, UpSettings
from common.errors import ConfigError
from common.worker.keys import load_keys
from decode_worker.process import handoff_endpoint
from router.access import Access, load_cluster_keys
from tests.fakes.cluster_keys import key_file, new_authority, write

AUTHORITY = new_authority()
BEYOND = ["0.0.0.0", "::", "192.0.2.7", "router.example"]


@pytest.fixture
def api_keys(tmp_path: Path) -> Path:
    path = tmp_path / "api-keys.txt"
    path.write_text("secret\n")
    return path


@pytest.mark.parametrize("host", BEYOND)
def test_the_http_port(host: str, api_keys: Path) -> None:
    for settings in (RouterSettings(host=host), UpSettings(model="m", host=host)):
        with pytest.raises(ConfigError, match=f"^--host {host} is .* needs --api-key-file .*--insecure"):
            Access.of(settings)
        assert Access.of(settings.model_copy(update={"insecure": True})).keys is None
        assert Access.of(settings.model_copy(update={"api_key_file": api_keys})).keys is not None


@pytest.mark.parametrize("host", BEYOND)
def test_the_ports_of_workers(host: str, tmp_path: Path) -> None:
    for cls, role in ((PrefillSettings, "prefill"), (DecodeSettings, "decode")):
        keys = write(tmp_path / f"{role}.json", key_file(AUTHORITY, role))  # type: ignore[arg-type]
        settings = cls(model="m", host=host)
        with pytest.raises(ConfigError, match=f"^--host {host} is .* needs --cluster-key-file .*--insecure"):
            load_keys(settings, role)  # type: ignore[arg-type]
        assert load_keys(settings.model_copy(update={"insecure": True}), role) is None  # type: ignore[arg-type]
        loaded = load_keys(settings.model_copy(update={"cluster_key_file": keys}), role)  # type: ignore[arg-type]
        assert loaded is not None
        assert loaded.value.role == role


def test_the_handoff_port(tmp_path: Path) -> None:
    settings = DecodeSettings(model="m", handoff_endpoint="tcp://0.0.0.0:7003")
    with pytest.raises(
        ConfigError, match=r"^--handoff-endpoint at 0\.0\.0\.0 .* needs --cluster-key-file .*--insecure"
    ):
        handoff_endpoint(settings)
    for changes in ({"insecure": True}, {"cluster_key_file": tmp_path / "decode.json"}, {"role": "both"}):
        assert handoff_endpoint(settings.model_copy(update=changes)) == "tcp://0.0.0.0:7003"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_nothing(host: str) -> None:
    assert Access.of(RouterSettings(host=host)).keys is None
    assert load_keys(DecodeSettings(model="m", host=host), "decode") is None
    assert handoff_endpoint(DecodeSettings(model="m", host=host)).startswith("tcp://")
    assert handoff_endpoint(DecodeSettings(model="m", handoff_endpoint="ipc:///run/decode")) == "ipc:///run/decode"


@pytest.mark.parametrize("source", ["p0.example:7001", "192.0.2.7:7001", "[fd00::1]:7001", "dns://prefill:7001"])
def test_calls_to_workers(source: str, tmp_path: Path) -> None:
    for side in ("prefill", "decode"):
        settings = RouterSettings.model_validate({side: ["127.0.0.1:7000", source]})
        with pytest.raises(ConfigError, match=f"^--{side} .* is another machine, .* need --cluster-key-file"):
            load_cluster_keys(settings)
        assert load_cluster_keys(settings.model_copy(update={"insecure": True})) is None
        keys = write(tmp_path / "router.json", key_file(AUTHORITY, "router"))
        assert load_cluster_keys(settings.model_copy(update={"cluster_key_file": keys})) is not None


@pytest.mark.parametrize("source", ["127.0.0.1:7001", "[::1]:7001", "localhost:7001", "dns://localhost:7001"])
def test_calls_to_workers_on_this_machine(source: str) -> None:
    assert load_cluster_keys(RouterSettings(prefill=[source])) is None
