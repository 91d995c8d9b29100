"""docs/configuration.md, which scripts/generate_config_reference.py writes, says what the loader does."""

import re
from pathlib import Path

import pytest

from common.config import UpSettings
from common.settings_loader import SETTINGS, load_settings
from deploy.cli import COMMANDS
from tests.docs.blocks import ROOT, blocks

PAGE = (ROOT / "docs" / "configuration.md").read_text()
#: A setting in its three spellings, on the page.
FILE, VARIABLE, FLAG = "max_num_seqs = 32", "MOERELAY_MAX_NUM_SEQS=32", "--max-num-seqs 32"


def test_the_file_that_is_shown_is_accepted(tmp_path: Path) -> None:
    [example] = [block for block in blocks("toml") if block.page == "docs/configuration.md"]
    path = tmp_path / "up.toml"
    path.write_text(example.text)
    settings = load_settings(UpSettings, ["--config", str(path)], prog="up", environ={})
    assert (settings.kv_cache_memory, settings.slo_itl) == (8 * 2**30, 0.05)


@pytest.mark.parametrize("strongest", [0, 1, 2])
def test_later_spellings_win(strongest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(f"`{spelling}`" in PAGE for spelling in (FILE, VARIABLE, FLAG))
    path = tmp_path / "up.toml"
    path.write_text(FILE.replace("32", "1"))
    argv = ["--model", "m", "--config", str(path)]
    if strongest > 0:
        name, value = VARIABLE.replace("32", "2").split("=")
        monkeypatch.setenv(name, value)
    if strongest > 1:
        argv += FLAG.replace("32", "3").split()
    assert load_settings(UpSettings, argv, prog="up").max_num_seqs == strongest + 1


def test_every_setting_has_a_row_with_its_meaning() -> None:
    for cls in SETTINGS:
        for name, field in cls.model_fields.items():
            row = rf"^\| `--{name.replace('_', '-')}` \| [^|]+\| [^|]*\| {re.escape(field.description or '')} \|$"
            assert re.search(row, PAGE, re.M), name


def test_every_command_has_a_section() -> None:
    for command in COMMANDS.keys() - {"up", "version"}:
        assert f"\n## moerelay {command}\n" in PAGE
