"""Finds a checkpoint: a local directory as it is, anything else on the Hugging Face hub. Imports no torch."""

from pathlib import Path

from common.errors import CheckpointError
from common.model.families import parse_config

_SETTINGS = ["*.json", "*.jinja"]
_WEIGHTS = ["*.safetensors"]


def resolve_model(name: str) -> Path:
    """The directory of a checkpoint, downloaded (or taken from the hub's cache) if `name` is a hub id.

    An unsupported model is refused before its weights are downloaded. A local directory needs no network.

    Raises:
        CheckpointError: there is no such directory or hub id, the hub cannot be reached, or the model is not supported.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    if local.exists() or name.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"{name} is not a directory; give a checkpoint directory or a Hugging Face hub id")
    parse_config(_download(name, _SETTINGS))
    return _download(name, _SETTINGS + _WEIGHTS)


def _download(repo_id: str, patterns: list[str]) -> Path:
    # Late: its half second would be a third of the time in which a local checkpoint is refused.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except HFValidationError as error:
        raise CheckpointError(f"{repo_id!r} is neither a directory nor a Hugging Face hub id: {error}") from error
    except OSError as error:  # the base of every error that the hub's client raises about the network or the hub
        raise CheckpointError(
            f"{repo_id} is no local directory, and downloading it from the Hugging Face hub failed: {error}; "
            "check the name, the network and HF_TOKEN, or give the path of a local checkpoint"
        ) from error
