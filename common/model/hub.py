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
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except HFValidationError as error:
        raise CheckpointError(
            f"there is no directory {repo_id}, and it is no Hugging Face hub id either (OWNER/NAME); check the path"
        ) from error
    except OSError as error:  # the base of every error that the hub's client raises about the network or the hub
        if isinstance(error, GatedRepoError):
            why = "the Hugging Face hub gives that model only to those who have its owner's leave; set HF_TOKEN"
        elif isinstance(error, RepositoryNotFoundError):
            why = "the Hugging Face hub has no model of that name; check the path, or set HF_TOKEN if it is private"
        elif isinstance(error, LocalEntryNotFoundError | ConnectionError):
            why = "the Hugging Face hub cannot be reached to look for one of that name; check the path, or the network"
        else:
            reason = " ".join(str(error).split())
            why = f"downloading it from the Hugging Face hub failed: {reason}; check the path, or try again"
        raise CheckpointError(f"there is no directory {repo_id}, and {why}") from error
