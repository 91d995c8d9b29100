"""Links between the pages lead somewhere, and what pages say about flags, errors and routes is what the code has."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from common.config import UpSettings
from common.errors import HTTP_TABLE
from common.settings_loader import SETTINGS
from deploy.cli import COMMANDS
from router.surface import CONTROL, PUBLIC

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CHANGELOG.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
FLAG = re.compile(r"`--([a-z][a-z-]+)[^`]*`")
CODE = re.compile(r"^```.*?^```", re.M | re.S)

#: Flags of other programs that pages name, and --config, which is no setting.
OF_OTHERS = {"config", "recreate", "build-arg"}


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target, anchor in LINK.findall(CODE.sub("", path.read_text())):
        found = (path.parent / target) if target else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


def all_flags() -> set[str]:
    """Of every setting and every command."""
    found = {name.replace("_", "-") for cls in SETTINGS for name in cls.model_fields}
    for module, _ in COMMANDS.values():
        if command_line := getattr(import_module(module), "command_line", None):
            found |= {flag[2:] for flag in re.findall(r"--[a-z][a-z-]+", command_line().format_help())}
    return found | OF_OTHERS


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str) -> None:
    named = {flag.removeprefix("no-") for flag in FLAG.findall((ROOT / page).read_text())}
    assert named <= all_flags()


def row_of(page: str, first_cell: str) -> str:
    [row] = re.findall(rf"^\| {re.escape(first_cell)} \|.*$", (ROOT / page).read_text(), re.M)
    return str(row)


def test_every_error_is_listed_with_its_status() -> None:
    for status, kind in set(HTTP_TABLE.values()):
        assert f"`{kind}`" in row_of("docs/http-api.md", str(status))


@pytest.mark.parametrize(
    ("flag", "shown"),
    [
        ("max-header-bytes", "64 KiB"),
        ("max-body-bytes", "32 MiB"),
        ("body-timeout-s", "60 s"),
        ("max-prompts", "128"),
        ("max-messages", "4096"),
        ("max-n", "128"),
        ("max-logprobs", "20"),
        ("max-stop-strings", "64"),
        ("max-stop-chars", "1024"),
        ("max-mask-ids", "16777216"),
        ("max-listed-tokens", "4096"),
        ("max-grammar-bytes", "64 KiB"),
        ("max-waiting", "1024"),
        ("max-message-bytes", "64 MiB"),
        ("max-event-bytes", "64 KiB"),
        ("client-stall-timeout-s", "120 s"),
    ],
)
def test_defaults_of_the_limits(flag: str, shown: str) -> None:
    number, _, unit = shown.partition(" ")
    scale = {"KiB": 2**10, "MiB": 2**20}.get(unit, 1)
    assert UpSettings.model_fields[flag.replace("-", "_")].default == int(number) * scale
    rows = [
        line for line in (ROOT / "docs/http-api.md").read_text().splitlines() if f"| `--{flag}` | {shown} |" in line
    ]
    assert len(rows) == 1


def test_every_route_is_described() -> None:
    http, dialects, control = ((ROOT / f"docs/{name}.md").read_text() for name in ("http-api", "dialects", "control"))
    for path in PUBLIC.paths:
        assert f"{path}`" in http or f"{path}`" in dialects, path
    for path in CONTROL.paths:
        assert re.search(rf"{path}[`\s?]", control), path
