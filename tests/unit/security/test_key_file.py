"""Key files: what they refuse, and what they never tell."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from common.errors import ConfigError
from common.security.key_file import KeyFile, KeyRole, read_key_file, watch_key_file
from tests.fakes.cluster_keys import key_file, new_authority, rotated, write

AUTHORITY = new_authority()
OTHER = key_file(new_authority(), "prefill")


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_what_is_written_is_read(role: KeyRole, tmp_path: Path) -> None:
    keys = key_file(AUTHORITY, role)
    assert read_key_file(write(tmp_path / "keys.json", keys), role) == keys


def test_only_prefill_workers_get_the_handoff_key() -> None:
    router, prefill, decode = (key_file(AUTHORITY, role) for role in ("router", "prefill", "decode"))
    secret = AUTHORITY.current.handoff_secret_key
    assert (router.handoff_secret_key, prefill.handoff_secret_key, decode.handoff_secret_key) == (None, secret, None)
    assert [len(keys.handoff_clients) for keys in (router, prefill, decode)] == [0, 0, 2]
    for keys in (router, prefill, decode):
        assert AUTHORITY.next.handoff_secret_key not in msgspec.json.encode(keys).decode()


def test_secrets_are_not_shown() -> None:
    prefill = key_file(AUTHORITY, "prefill")
    assert repr(prefill) == f"KeyFile(cluster='{AUTHORITY.cluster}', role='prefill', generation=1)"
    assert repr(AUTHORITY.current) == "Generation(1)"
    for secret in (AUTHORITY.current.handoff_secret_key, AUTHORITY.current.api_key, "PRIVATE"):
        assert secret not in repr(AUTHORITY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": "decode"}, r"is for a decode process; give this one prefill\.json of the same folder"),
        ({"format": 2}, "has format 2, and this version knows 1"),
        ({"handoff_secret_key": None}, "is damaged; make it anew"),
        ({"handoff_secret_key": "12"}, "is damaged"),
        ({"handoff_secret_key": "zz" * 32}, "is damaged"),
        ({"handoff_clients": ["ab" * 32]}, "is damaged"),
        ({"trusted": []}, "is damaged"),
        ({"expires": "soon"}, "is damaged"),
        ({"expires": None}, r"is no file of `moerelay keys`: Expected `str`, got `null` - at `\$\.expires`"),
        ({"more": 1}, "is no file of `moerelay keys`"),
        ({"certificate": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"}, "is damaged"),
        ({"certificate": ""}, "is damaged"),
        ({"certificate": OTHER.certificate}, "is damaged"),
        ({"private_key": "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"}, "is damaged"),
        ({"private_key": OTHER.private_key}, "is damaged"),
        ({"certificate": OTHER.certificate, "private_key": OTHER.private_key}, "is damaged"),
        ({"trusted": ["zz"]}, "is damaged"),
        ({"trusted": OTHER.trusted}, "is damaged"),
        ({"cluster": OTHER.cluster}, "is damaged"),
    ],
)
def test_refusals(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    fields = msgspec.json.decode(msgspec.json.encode(key_file(AUTHORITY, "prefill")))
    path.write_bytes(msgspec.json.encode(fields | changes))
    with pytest.raises(ConfigError, match=f"--cluster-key-file {path} {said}") as error:
        read_key_file(path, "prefill")
    assert AUTHORITY.current.handoff_secret_key not in error.value.message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_what_is_no_key_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key_file(path, "router")
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no file of `moerelay keys`"):
        read_key_file(path, "router")


@pytest.mark.parametrize(("days", "told"), [(29, ["cluster_keys_end_soon"]), (31, [])])
def test_an_end_that_is_near_is_told(days: int, told: list[str], tmp_path: Path) -> None:
    expires = (datetime.now(UTC) + timedelta(days=days)).strftime("%Y-%m-%d")
    keys = msgspec.structs.replace(key_file(AUTHORITY, "router"), expires=expires)
    with capture_logs() as logs:
        watch_key_file(write(tmp_path / "router.json", keys), "router")
    assert [entry["event"] for entry in logs] == told


def test_days_left() -> None:
    keys = msgspec.structs.replace(key_file(AUTHORITY, "router"), expires="2030-01-11")
    assert keys.days_left(datetime(2030, 1, 1, tzinfo=UTC)) == 10
    assert keys.days_left(datetime(2030, 1, 12, tzinfo=UTC)) == -1


def test_an_end_that_comes_near_while_a_process_runs_is_told_every_day(tmp_path: Path) -> None:
    now = [0.0]
    expires = (datetime.now(UTC) + timedelta(days=3)).strftime("%Y-%m-%d")
    keys = msgspec.structs.replace(key_file(AUTHORITY, "router"), expires=expires)
    file = watch_key_file(write(tmp_path / "router.json", keys), "router", clock=lambda: now[0])
    told = []
    for now[0] in (1.0, 86_399.0, 86_400.0, 86_401.0, 172_799.0, 172_801.0):
        with capture_logs() as logs:
            file.poll()
        told.append([entry["event"] for entry in logs])
    soon = ["cluster_keys_end_soon"]
    assert told == [[], [], soon, [], [], soon]


def test_seconds_until_the_end() -> None:
    keys = msgspec.structs.replace(key_file(AUTHORITY, "router"), expires="2026-03-02")
    assert keys.seconds_left(datetime(2026, 3, 1, 23, 59, tzinfo=UTC)) == 60
    assert keys.seconds_left(datetime(2026, 3, 3, tzinfo=UTC)) == -86_400


def test_a_file_that_would_end_the_cluster_is_not_taken_over(tmp_path: Path) -> None:
    """It is whole, or valid JSON at least; a peer would believe none of it."""
    keys, path = key_file(AUTHORITY, "router"), tmp_path / "router.json"
    file = watch_key_file(write(path, keys), "router")
    other = key_file(new_authority(), "router")
    for wrong in (other, msgspec.structs.replace(keys, private_key=other.private_key, generation=7)):
        with capture_logs() as logs:
            write(path, wrong)
            file.poll()
            file.poll()
        assert [entry["event"] for entry in logs] == ["key_file_unusable"]
        assert file.value == keys
    assert f"is of cluster {other.cluster}, this process of {AUTHORITY.cluster}" in read_refusal(path, other, keys)
    write(path, newer := key_file(rotated(AUTHORITY), "router"))
    file.poll()
    file.poll()
    assert file.value == newer


def read_refusal(path: Path, wrong: KeyFile, keys: KeyFile) -> str:
    with pytest.raises(ConfigError) as error:
        read_key_file(write(path, wrong), "router", keys.cluster)
    return error.value.message
