"""Sampling defaults of the checkpoint (generation_config.json); neutral where it says nothing."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from common.errors import ConfigError

FILE = "generation_config.json"


class SamplingDefaults(BaseModel):
    """What a request gets for a sampling field it leaves out."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=2)


def checkpoint_folder(model: str) -> Path:
    """The directory that `--model` names. Raises ConfigError if there is none."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"--model {model} is not a directory on this machine; the router itself downloads nothing: give it the "
            "local directory of the checkpoint, or start everything with `moerelay up`, which takes hub ids too"
        )
    return folder.resolve()


def load_defaults(model: str | None, *, ignore: bool) -> SamplingDefaults:
    """Reads the checkpoint's generation_config.json, unless told to ignore it or there is none.

    Raises:
        ConfigError: `model` is no directory, or the file is broken.
    """
    if model is None:
        return SamplingDefaults()
    folder = checkpoint_folder(model)
    if ignore or not (folder / FILE).exists():
        return SamplingDefaults()
    try:
        raw = json.loads((folder / FILE).read_bytes())
        if isinstance(raw, dict):
            raw = {name: value for name, value in raw.items() if value is not None}
        return SamplingDefaults.model_validate(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / FILE}: {error}; fix it or start with --ignore-generation-config") from error
