"""The command line that a class of settings makes."""

from argparse import SUPPRESS, Action
from pathlib import Path
from typing import Any

from common.arguments import ArgumentParser
from common.config import LogSettings
from common.setting_groups import GROUPS

#: Setting → its heading, and its place below that.
_PLACES = {name: (title, place) for title, names in GROUPS.items() for place, name in enumerate(names)}
#: What pydantic-settings writes behind the description of a setting that has no value unless it is given one.
_NO_DEFAULT = (" (default: None)", " (default: [])")


class SettingsParser(ArgumentParser):
    """Knows `--config`, and lists settings under headings; pydantic-settings adds them."""

    def __init__(self, cls: type[LogSettings], prog: str) -> None:
        super().__init__(prog, cls.__doc__)
        required = [name for name, field in cls.model_fields.items() if field.is_required()]
        # All of them in brackets, as argparse has it, fill three screens.
        self.usage = " ".join([prog, *(f"--{name.replace('_', '-')} {name.upper()}" for name in required), "[FLAG …]"])
        add_config(self)
        self._by_title = {title: self.add_argument_group(title) for title in GROUPS}

    def add_setting(self, *flags: str, **kwargs: Any) -> Action:
        """As argparse's `add_argument`."""
        for words in _NO_DEFAULT:
            kwargs["help"] = kwargs["help"].removesuffix(words)
        title, _ = _PLACES[kwargs["dest"]]
        return self._by_title[title].add_argument(*flags, **kwargs)

    def format_help(self) -> str:
        """With the settings in the order of their group, whichever class declares them."""
        for group in self._by_title.values():
            group._group_actions.sort(key=lambda action: _PLACES[action.dest])
        return super().format_help()


def add_config(parser: ArgumentParser) -> None:
    """Adds `--config`, which leaves no trace where it is not given."""
    text = "settings in TOML, weaker than variables and flags"
    parser.add_argument("--config", type=Path, metavar="FILE.toml", default=SUPPRESS, help=text)
