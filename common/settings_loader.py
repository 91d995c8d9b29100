"""Where settings come from: TOML file < environment (MOERELAY_*) < command line.

Unknown TOML keys, flags and MOERELAY_* variables are errors. Nothing else in the project reads the environment.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
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
from common.setting_errors import sentence
from common.settings_parser import SettingsParser, add_config
from common.suggestion import close_match

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
    try:
        source = CliSettingsSource[SettingsT](
            bound,
            root_parser=SettingsParser(bound, prog),
            parse_args_method=SettingsParser.parse_args,
            add_argument_method=SettingsParser.add_setting,
        )
        return CliApp.run(bound, cli_args=arguments, cli_settings_source=source)
    except ValidationError as error:
        raise ConfigError("; ".join(sentence(e, cls) for e in error.errors())) from error
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def settings_parser(cls: type[LogSettings], prog: str) -> SettingsParser:
    """The parser whose flags are the settings of `cls`, for whoever describes them."""
    bound = _bind(cls, None)
    parser = SettingsParser(bound, prog)
    CliSettingsSource(bound, root_parser=parser, add_argument_method=SettingsParser.add_setting)
    return parser


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if there is a MOERELAY_* variable that no process knows: most likely a misspelled setting."""
    known = {name.upper() for c in SETTINGS for name in c.model_fields}
    ours = {name: name.upper().removeprefix(ENV_PREFIX) for name in environ if name.upper().startswith(ENV_PREFIX)}
    unknown = sorted(name for name, setting in ours.items() if setting not in known)
    if unknown:
        meant = [f"{ENV_PREFIX}{match}" for name in unknown if (match := close_match(ours[name], known))]
        raise ConfigError(
            f"no setting knows the environment variable{'s' * (len(unknown) > 1)} {', '.join(unknown)}"
            + (f"; did you mean {', '.join(meant)}?" if meant else "")
        )


def _take_config_file(prog: str, argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """Splits `--config PATH` off the arguments, since the file is read before the rest; checks that it is TOML."""
    parser = ArgumentParser(prog, None, add_help=False)
    add_config(parser)
    known, rest = parser.parse_known_args(argv)
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
