"""`moerelay keys`: files, modes, rotation, and nothing secret on the screen."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.security.key_file import read_key_file
from deploy.cli import main
from deploy.keys.command import rotate
from deploy.keys.folder import ROLES, KeyFolder
from router.auth import listed_keys
from tests.fakes.cluster_keys import NOW, new_authority

FILES = {"authority.json", "router.json", "prefill.json", "decode.json", "api-keys.txt", "admin-keys.txt"}


def keys(*arguments: str | Path) -> int:
    return main(["keys", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert keys("init", tmp_path / "keys") == 0
    capsys.readouterr()
    return tmp_path / "keys"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def api_keys(folder: Path) -> list[str]:
    return listed_keys(folder / "api-keys.txt", "--api-key-file")


def secrets_of(folder: Path) -> list[str]:
    authority = KeyFolder(folder).authority()
    return [
        secret
        for each in authority.believed
        for secret in (each.handoff_secret_key, each.api_key, each.admin_key, "PRIVATE KEY")
    ]


def test_init_makes_files_for_their_owner_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "keys"
    assert keys("init", folder) == 0
    assert {path.name for path in folder.iterdir()} == FILES
    assert mode(folder) == 0o700
    assert {mode(folder / name) for name in FILES} == {0o600}
    for role in ("router", "prefill", "decode"):
        assert read_key_file(folder / f"{role}.json", role).generation == 1
    said = capsys.readouterr().out
    assert all(name in said for name in FILES)
    assert not any(secret in said for secret in secrets_of(folder))


def test_init_spoils_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert keys("init", folder) == 2
    assert "holds keys already; use `moerelay keys rotate`, or another folder" in capsys.readouterr().err
    assert keys("init", "--if-missing", folder) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_rotation_keeps_the_last_generation_and_what_others_wrote(folder: Path) -> None:
    (folder / "api-keys.txt").write_text((folder / "api-keys.txt").read_text() + "# a trainer\nits-key\n")
    [first, *_] = api_keys(folder)
    assert keys("rotate", folder) == 0
    second = KeyFolder(folder).authority().current.api_key
    assert set(api_keys(folder)) == {first, second, "its-key"}
    assert "# a trainer" in (folder / "api-keys.txt").read_text()
    assert keys("rotate", folder) == 0
    third = KeyFolder(folder).authority().current.api_key
    assert set(api_keys(folder)) == {second, third, "its-key"}
    assert read_key_file(folder / "decode.json", "decode").generation == 3
    assert {mode(folder / name) for name in FILES} == {0o600}
    assert {path.name for path in folder.iterdir()} == FILES


def test_the_newest_of_its_api_keys_comes_first(folder: Path) -> None:
    """`moerelay generate --api-key-file` and others send the first."""
    assert keys("rotate", folder) == 0
    authority = KeyFolder(folder).authority()
    assert authority.last is not None
    assert api_keys(folder) == [authority.current.api_key, authority.last.api_key]


def test_files_stay_the_ones_that_are_mounted_somewhere(folder: Path) -> None:
    before = {name: (folder / name).stat().st_ino for name in FILES - {"authority.json"}}
    assert keys("rotate", folder) == 0
    assert {name: (folder / name).stat().st_ino for name in before} == before


def test_show_tells_fingerprints_ends_and_modes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "router.json").chmod(0o644)
    (folder / "decode.json").write_text("{}")
    assert keys("show", folder) == 0
    said = capsys.readouterr().out
    assert "generation 1 (current)" in said
    assert "generation 2 (next)" in said
    assert "router.json: generation 1, certificate " in said
    assert "decode.json: --cluster-key-file" in said
    assert "is no file of `moerelay keys`" in said
    assert f"warning: {folder}/router.json has mode 0644; others can read it, which chmod 600 ends" in said
    assert not any(secret in said for secret in secrets_of(folder))


def test_show_tells_what_is_behind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = (folder / "prefill.json").read_bytes()
    keys("rotate", folder)
    (folder / "prefill.json").write_bytes(old)
    capsys.readouterr()
    assert keys("show", folder) == 0
    assert "; behind: run `moerelay keys rotate`" in capsys.readouterr().out


class FullDisk(KeyFolder):
    """Of the file `name` only the first half can be written, or nothing."""

    def __init__(self, path: Path, name: str, *, half: bool) -> None:
        super().__init__(path)
        self._name = name
        self._half = half

    def _overwrite(self, name: str, content: bytes) -> None:
        if name != self._name:
            return super()._overwrite(name, content)
        if self._half:
            super()._overwrite(name, content[: len(content) // 2])
        raise ConfigError(f"{self.path / name} cannot be written: No space left on device")


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("name", ["router.json", "decode.json", "api-keys.txt", "admin-keys.txt"])
def test_a_rotation_that_was_interrupted_is_ended_by_the_next(
    name: str, half: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two generations ahead of what processes have, neither side would believe the other."""
    with pytest.raises(ConfigError, match="No space left"):
        list(rotate(FullDisk(folder, name, half=half), NOW, 1))
    assert KeyFolder(folder).authority().current.number == 2
    assert keys("rotate", folder) == 0
    said = capsys.readouterr().out
    assert name in said
    assert "lacked generation 2: all files have it now\nno newer generation was made" in said
    authority = KeyFolder(folder).authority()
    assert authority.last is not None
    assert [each.number for each in authority.believed] == [1, 2, 3]
    assert {read_key_file(folder / f"{role}.json", role).generation for role in ROLES} == {2}
    assert api_keys(folder) == [authority.current.api_key, authority.last.api_key]
    assert keys("rotate", folder) == 0
    assert "generation 3 of cluster" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["rotate", "show"])
def test_folders_without_keys(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(action, tmp_path / "nowhere") == 2
    assert "authority.json cannot be read: No such file or directory; `moerelay keys init`" in capsys.readouterr().err
    (tmp_path / "authority.json").write_text("{}")
    assert keys(action, tmp_path) == 2
    assert "authority.json was not made by `moerelay keys`" in capsys.readouterr().err


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        KeyFolder(tmp_path / "file" / "keys").write_new(new_authority(), now=NOW, days=1)


def test_a_file_of_clients_that_cannot_be_read_ends_a_rotation_before_it_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is looked at first: each attempt would else make one more generation."""
    with (folder / "api-keys.txt").open("ab") as file:
        file.write("# Schlüssel\n".encode("latin-1"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _ in range(2):
        assert keys("rotate", folder) == 2
        assert "api-keys.txt cannot be read: 'utf-8' codec can't decode byte 0xfc" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
