"""Where settings come from: TOML file < environment (MOERELAY_*) < command line.

Unknown TOML keys, flags and MOERELAY_* variables are errors. Nothing else in the project reads the environment.
"""

import os
import tomllib
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from common.arguments import ArgumentParser
from common.config import ENV_PREFIX, DecodeSettings, LogSettings, PrefillSettings, RouterSettings, UpSettings
from common.errors import ConfigError

#: Every settings class that a MOERELAY_* variable may belong to.
SETTINGS: tuple[type[LogSettings], ...] = (PrefillSettings, DecodeSettings, RouterSettings, UpSettings)

SettingsT = TypeVar("SettingsT", bound=LogSettings)


def load_settings(
    cls: type[SettingsT], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] = os.environ
) -> SettingsT:
    """Reads `--config FILE.toml`, MOERELAY_* and `argv` into one frozen settings object.

    Raises:
        ConfigError: a value, key, flag or variable is wrong; the message names it.
    """
    check_environment(environ)
    arguments, path = _take_config_file(prog, argv)
    bound = _bind(cls, path)
    parser = _parser(prog, bound.__doc__)
    try:
        return CliApp.run(bound, cli_args=arguments, cli_settings_source=CliSettingsSource(bound, root_parser=parser))
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(e) for e in error.errors())) from error
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def settings_parser(cls: type[LogSettings], prog: str) -> ArgumentParser:
    """The parser whose flags are the settings of `cls`, for whoever describes them."""
    bound = _bind(cls, None)
    parser = _parser(prog, bound.__doc__)
    CliSettingsSource(bound, root_parser=parser)
    return parser


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if there is a MOERELAY_* variable that no process knows: most likely a misspelled setting."""
    known = {f"{ENV_PREFIX}{name.upper()}" for c in SETTINGS for name in c.model_fields}
    unknown = sorted(name for name in environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)
    if unknown:
        raise ConfigError(f"no setting knows the environment variable{'s' * (len(unknown) > 1)} {', '.join(unknown)}")


def _parser(prog: str, description: str | None = None, *, add_help: bool = True) -> ArgumentParser:
    """A parser that knows `--config` only, and leaves no trace of it where it is not given."""
    parser = ArgumentParser(prog, description, add_help=add_help)
    text = "settings in TOML, weaker than variables and flags"
    parser.add_argument("--config", type=Path, metavar="FILE.toml", default=SUPPRESS, help=text)
    return parser


def _take_config_file(prog: str, argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """Splits `--config PATH` off the arguments, since the file is read before the rest; checks that it is TOML."""
    known, rest = _parser(prog, add_help=False).parse_known_args(argv)
    path: Path | None = getattr(known, "config", None)
    if path is None:
        return rest, None
    try:
        tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return rest, path


def _bind(cls: type[SettingsT], toml: Path | None) -> type[SettingsT]:
    """`cls` with a TOML file as the weakest source."""

    class Bound(cls):  # type: ignore[valid-type, misc]
        __doc__ = f"{cls.__doc__} Each flag is also a MOERELAY_* variable and a key of --config FILE.toml."
        model_config = SettingsConfigDict(toml_file=toml)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    return Bound


def _sentence(error: ErrorDetails) -> str:
    """One pydantic error as `--flag: what is wrong`."""
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0]).replace("_", "-")
    return f"{name}: unknown setting" if error["type"] == "extra_forbidden" else f"--{name}: {message}"
