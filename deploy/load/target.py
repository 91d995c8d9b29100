"""What a load test must know of the cluster before it begins."""

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import CheckpointError, ConfigError, UnavailableError
from common.model.families import parse_config
from deploy.load.contract import RowRules
from deploy.load.stream import Json

#: Ids that every vocabulary has.
_SMALLEST_VOCABULARY = 256
#: A generation may take long; a peer that stays silent for longer than this is gone.
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster at `url`; `api_key` is sent with every request."""

    url: str
    api_key: str | None = None

    def connect(self) -> HTTPConnection:
        """A connection that is opened when it is used."""
        parts = urlsplit(self.url)
        cls = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return cls(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)

    @property
    def headers(self) -> dict[str, str]:
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", "Connection": "close"} | key

    def get(self, path: str) -> Json:
        """Raises UnavailableError."""
        connection = self.connect()
        try:
            connection.request("GET", path, headers=self.headers)
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise UnavailableError(f"{self.url}{path}: HTTP {response.status}: {text[:200]!r}")
            answer: Json = json.loads(text)
            return answer
        except (OSError, HTTPException, ValueError) as error:
            raise UnavailableError(f"nothing that serves answers at {self.url}: {error}") from error
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Facts:
    """Of the model that is served."""

    max_model_len: int
    vocab_size: int
    rows: RowRules

    @classmethod
    def read(cls, target: Target, model: Path | None, vocab_size: int | None) -> "Facts":
        """From the cluster, and from its checkpoint, if that is `model` or lies where the cluster says.

        Raises:
            UnavailableError: the cluster does not answer, or has no worker yet.
            CheckpointError: `model` is no checkpoint.
        """
        [card] = target.get("/v1/models")["data"]
        if card["max_model_len"] is None:
            raise UnavailableError(f"the cluster at {target.url} has no worker yet; wait until /ready answers 200")
        path = model or _served_here(card)
        if path is None:
            return cls(card["max_model_len"], vocab_size or _SMALLEST_VOCABULARY, RowRules())
        config = parse_config(path)
        return cls(card["max_model_len"], vocab_size or config.vocab_size, RowRules.of_checkpoint(path))

    def require_room(self, longest: int) -> None:
        """Raises ConfigError if sequences of so many tokens do not fit into the context."""
        if longest > self.max_model_len:
            raise ConfigError(
                f"--prompt-tokens and --output-tokens come to {longest} tokens, and the context holds "
                f"{self.max_model_len}; ask for less"
            )


def _served_here(card: Json) -> Path | None:
    """The checkpoint that the cluster names, if this machine has it."""
    root = card.get("root")
    try:
        if root and (Path(root) / "config.json").is_file():
            parse_config(Path(root))
            return Path(root)
    except CheckpointError:  # another one of that name
        return None
    return None
