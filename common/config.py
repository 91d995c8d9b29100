"""Settings of every process: TOML file < environment (MOERELAY_*) < command line; validated once; frozen.

Unknown TOML keys, flags and MOERELAY_* variables are errors. Nothing else in the project reads the environment.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliImplicitFlag,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from common.errors import ConfigError

ENV_PREFIX = "MOERELAY_"

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: object) -> object:
    """'1GiB' → 1073741824; numbers pass through. Raises ValueError on an unknown unit."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    digits = text.rstrip("bkmgti")
    unit = text[len(digits) :]
    if unit not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number with B, KiB, MiB or GiB")
    return int(float(digits) * _UNITS[unit])


def _host_port(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ValueError(f"{value!r} is not HOST:PORT")
    return value


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
HostPort = Annotated[str, AfterValidator(_host_port)]
Port = Annotated[int, Field(ge=0, lt=65_536)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class LogSettings(BaseSettings):
    """Shared by every process."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        validate_default=True,
        protected_namespaces=(),
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe line that is logged."
    )
    log_format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, JSON elsewhere.")


class ModelSettings(LogSettings):
    """How the checkpoint is loaded and computed; equal on every worker of a cluster."""

    model: str = Field(description="Checkpoint directory, or a Hugging Face hub id.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: what the checkpoint declares.")
    max_model_len: int | None = Field(None, gt=1, description="Context in tokens; default: what the checkpoint allows.")
    block_size: int = Field(16, description="Tokens per KV block: a power of two, at most 256.")
    kv_cache_memory: ByteSize | None = Field(None, description="KV cache per worker, e.g. 1GiB (the default).")
    num_kv_blocks: int | None = Field(
        None, gt=1, description="KV cache per worker in blocks, instead of --kv-cache-memory."
    )
    max_num_batched_tokens: int = Field(256, gt=0, description="Tokens per engine step: the size of a prefill chunk.")
    max_num_seqs: int = Field(64, gt=0, description="Sequences in the running batch.")
    max_waiting: int = Field(1024, gt=0, description="Requests that may wait for blocks; one more is refused (429).")
    num_threads: int | None = Field(None, gt=0, description="torch threads per worker; default: cores / workers.")
    enable_return_routed_experts: CliImplicitFlag[bool] = Field(True, description="Capture and return routing rows.")
    weight_version: str = Field("0", description="Label of the weights that are loaded.")
    tensor_parallel_size: int = Field(1, ge=1, description="Only 1 is supported.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Only 1: routing cannot follow it.")
    decode_context_parallel_size: int = Field(1, ge=1, description="Only 1: routing cannot follow it.")
    prefill_context_parallel_size: int = Field(1, ge=1, description="Only 1: routing cannot follow it.")
    debug_poison_kv: CliImplicitFlag[bool] = Field(False, description="Fill free blocks with NaN, to find stale reads.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.block_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"--block-size must be a power of two, at most 256, got {self.block_size}")
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ValueError("--kv-cache-memory and --num-kv-blocks exclude each other")
        kinds = ("tensor", "pipeline", "decode_context", "prefill_context")
        wide = [f"--{k.replace('_', '-')}-parallel-size" for k in kinds if getattr(self, f"{k}_parallel_size") > 1]
        if wide:
            raise ValueError(f"{', '.join(wide)} must be 1: routing rows cannot follow a model that is split this way")
        return self


class WorkerSettings(ModelSettings):
    """One prefill or decode worker."""

    worker_id: str = Field("", description="Unique name in the cluster; default: role and port.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(0, description="gRPC port; 0 takes a free one.")
    advertise_address: str | None = Field(None, description="Host name or address at which others reach this worker.")
    ready_file: Path | None = Field(None, description="Written, as JSON, once the worker serves.")
    max_message_bytes: ByteSize = Field(64 * 2**20, description="Largest gRPC message, both ways.")
    handoff_timeout_s: Seconds = Field(5.0, description="A handoff without progress for this long fails.")
    drain_timeout_s: Seconds = Field(30.0, description="How long live requests may go on after SIGTERM.")

    @property
    def reachable_host(self) -> str:
        return self.advertise_address or self.host


class PrefillSettings(WorkerSettings):
    """moerelay prefill worker: computes prompts and hands KV and routing rows to decode workers."""


class DecodeSettings(WorkerSettings):
    """moerelay decode worker: receives handoffs (or, as role both, prefills itself) and generates tokens."""

    role: Literal["decode", "both"] = Field("decode", description="both: prefill here too, no handoff.")
    handoff_endpoint: str | None = Field(None, description="ZMQ endpoint to bind; default: tcp on --host, free port.")
    handoff_credit_bytes: ByteSize = Field(64 * 2**20, description="Bytes one handoff may have in flight.")


class RouterSettings(LogSettings):
    """moerelay router: the HTTP API in front of prefill and decode workers."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8000, description="HTTP port; 0 takes a free one.")
    ready_file: Path | None = Field(None, description="Written, as JSON, once the port is bound.")
    prefill: list[HostPort] = Field([], description="gRPC addresses of prefill workers.")
    decode: list[HostPort] = Field([], description="gRPC addresses of decode workers (role both: no prefill needed).")
    model: str | None = Field(None, description="Checkpoint directory, for its tokenizer and generation_config.json.")
    served_model_name: str | None = Field(None, description="Name in /v1/models; default: the directory's name.")
    enable_return_routed_experts: CliImplicitFlag[bool] = Field(True, description="Return routing rows.")
    stream_routed_experts: Literal["delta", "final"] = Field(
        "delta", description="How rows travel in streams by default."
    )
    ignore_generation_config: CliImplicitFlag[bool] = Field(False, description="Neutral sampling defaults.")
    max_event_bytes: ByteSize = Field(64 * 2**10, description="Largest SSE event in delta streams.")
    max_body_bytes: ByteSize = Field(32 * 2**20, description="Largest request body.")
    max_message_bytes: ByteSize = Field(64 * 2**20, description="Largest gRPC message, both ways.")
    max_n: int = Field(128, gt=0, description="Largest number of choices per request.")
    max_logprobs: int = Field(20, ge=0, description="Largest number of logprobs per token.")
    heartbeat_interval_s: Seconds = Field(0.5, description="How often each worker is asked for its state.")
    heartbeat_timeout_s: Seconds = Field(3.0, description="A worker silent for this long is suspect.")
    connect_timeout_s: Seconds = Field(3.0, description="Time for a worker to accept a request.")
    drain_timeout_s: Seconds = Field(30.0, description="How long live requests may go on after SIGTERM.")


class UpSettings(ModelSettings):
    """Start a whole cluster on this machine and print one line on stdout when it serves."""

    prefill: int = Field(1, ge=0, description="Number of prefill workers.")
    decode: int = Field(1, ge=1, description="Number of decode workers.")
    mode: Literal["disaggregated", "aggregated"] = Field("disaggregated", description="aggregated: no handoff.")
    host: str = Field("127.0.0.1", description="Address of the HTTP port.")
    port: Port = Field(8000, description="HTTP port; 0 takes a free one.")
    served_model_name: str | None = Field(None, description="Name in /v1/models; default: the directory's name.")
    stream_routed_experts: Literal["delta", "final"] = Field(
        "delta", description="How rows travel in streams by default."
    )
    ignore_generation_config: CliImplicitFlag[bool] = Field(False, description="Neutral sampling defaults.")
    handoff_timeout_s: Seconds = Field(5.0, description="A handoff without progress for this long fails.")
    drain_timeout_s: Seconds = Field(30.0, description="How long live requests may go on after SIGTERM.")
    start_timeout_s: Seconds = Field(600.0, description="Time for every process to become ready.")

    @model_validator(mode="after")
    def _has_prefill(self) -> Self:
        if self.mode == "disaggregated" and self.prefill < 1:
            raise ValueError(
                "--prefill must be at least 1 in disaggregated mode; for one process use --mode aggregated"
            )
        return self


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
    known = {f"{ENV_PREFIX}{name.upper()}" for c in SETTINGS for name in c.model_fields}
    unknown = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name.upper() not in known)
    if unknown:
        raise ConfigError(f"no setting knows the environment variable{'s' * (len(unknown) > 1)} {', '.join(unknown)}")
    arguments, path = _take_config_file(argv)
    try:
        return CliApp.run(_bind(cls, prog, path), cli_args=arguments)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(e) for e in error.errors())) from error
    except SettingsError as error:
        raise ConfigError(str(error).removeprefix("error parsing CLI: ")) from error


def _take_config_file(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """Splits `--config PATH` off the arguments; checks that the file is TOML."""
    rest = list(argv)
    if "--config" not in rest:
        return rest, None
    at = rest.index("--config")
    if at + 1 >= len(rest):
        raise ConfigError("--config needs the path of a TOML file")
    path = Path(rest[at + 1])
    del rest[at : at + 2]
    try:
        tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return rest, path


def _bind(cls: type[SettingsT], prog: str, toml: Path | None) -> type[SettingsT]:
    """`cls` with a program name and a TOML file as the weakest source."""

    class Bound(cls):  # type: ignore[valid-type, misc]
        __doc__ = f"{cls.__doc__} Each flag is also a MOERELAY_* variable and a key of --config FILE.toml."
        # Wrong flags are a SettingsError, hence one line, instead of argparse's usage and exit.
        model_config = SettingsConfigDict(cli_prog_name=prog, toml_file=toml, cli_exit_on_error=False)

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
