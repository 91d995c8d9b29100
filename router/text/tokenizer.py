"""The tokenizer of a checkpoint: text to ids, ids to text and to the bytes they stand for."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from common.errors import ConfigError, InvalidRequestError
from router.text.pieces import PieceDecoder, piece_decoder
from router.text.token_length import max_token_chars

TOKENIZER_FILE = "tokenizer.json"
#: Later files win.
_SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Immutable after construction, so that several threads may encode at once (long prompts belong in one).

    Decoding is defined on bytes: what the tokens stand for is concatenated and read as UTF-8, every maximal piece of
    invalid bytes giving one U+FFFD. That is what `tokenizers` does for byte-level vocabularies; for sentencepiece with
    byte fallback it replaces a whole run of byte tokens, valid characters included, which no stream could do.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: PieceDecoder,
        special_tokens: Mapping[str, str],
        max_token_chars: int | None = None,
    ) -> None:
        """Args:
        special_tokens: by role, e.g. {"eos_token": "<|im_end|>"}.
        max_token_chars: see `router.text.token_length`.
        """
        self._backend = backend
        self._decoder = decoder
        self._bytes: dict[int, bytes] = {}
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens))
        #: One more than the largest id; the model's vocabulary may be larger.
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        #: Characters of a text that one token stands for at most; None if there is no bound.
        self.max_token_chars = max_token_chars
        #: Ids that `skip_special_tokens` leaves out.
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        #: Number of leading spaces that a text loses at its very beginning.
        self.strip_start = decoder.strip_start

    def encode(self, text: str, add_special_tokens: bool, *, param: str = "prompt") -> list[int]:
        """Ids of `text`; `add_special_tokens` as the checkpoint's post-processor defines (a leading `<s>`, say).

        Raises:
            InvalidRequestError: a lone surrogate, which is no character; `param` names the field.
        """
        check_unicode(text, param=param)
        # Not `encode`: that holds the interpreter's lock for as long as it takes, in whatever thread it runs.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def check_fits(self, text: str, max_model_len: int | None, *, param: str) -> None:
        """Refuses a text that is too long for the context whatever its tokens are, without encoding it.

        Raises:
            InvalidRequestError: `param` names the field. Never for what would fit; None is an unknown context.
        """
        if max_model_len is None or self.max_token_chars is None:
            return
        most = max_model_len * self.max_token_chars
        if len(text) > most:
            raise InvalidRequestError(
                f"{param}: the text has {len(text)} characters; at most {most} can fit into the context of "
                f"{max_model_len} tokens, because no token has more than {self.max_token_chars}",
                param=param,
            )

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Text of ids that begin a text; ids that no token has give nothing."""
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        joined = b"".join(self.token_bytes(i) or b"" for i in token_ids if i not in hidden)
        return strip_spaces(joined.decode(errors="replace"), self.strip_start)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What a token stands for after other text; None for an id that no token has."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if piece is None:
            return None
        # Filled as needed: a large vocabulary has many entries that are never seen.
        return self._bytes.setdefault(token_id, self._decoder(piece))

    def token_text(self, token_id: int) -> str:
        """`token_bytes` read as UTF-8, with U+FFFD for what is no whole character; "" for an id that no token has."""
        return (self.token_bytes(token_id) or b"").decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry such as `<|im_end|>`."""
        return self._backend.token_to_id(token)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None if it has no tokenizer.json.

    Raises:
        ConfigError: a file that cannot be read, or is not a tokenizer.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return None
    spec = read_json_object(path)
    special_tokens: dict[str, str] = {}
    for name in _SETTINGS_FILES:
        if (folder / name).is_file():
            special_tokens |= _special_tokens(read_json_object(folder / name), folder / name)
    backend = _load_backend(path, special_tokens)
    return Tokenizer(backend, piece_decoder(spec.get("decoder")), special_tokens, max_token_chars(spec, backend))


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises ConfigError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}", param="model")
    return value


def check_unicode(text: str, *, param: str) -> None:
    """Raises InvalidRequestError for lone surrogates: JSON can spell them, but no tokenizer can read them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds the lone surrogate U+{ord(text[error.start]):04X} at index {error.start}: no character",
            param=param,
        ) from error


def strip_spaces(text: str, limit: int) -> str:
    """`text` without its first spaces, at most `limit` of them."""
    count = 0
    while count < limit and text.startswith(" ", count):
        count += 1
    return text[count:]


def _load_backend(path: Path, special_tokens: Mapping[str, str]) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises no other class, whatever the fault
        raise ConfigError(f"{path} is not a tokenizer: {error}", param="model") from error
    # Some checkpoints ship the settings their training used: prompts would be cut without a word.
    backend.no_truncation()
    backend.no_padding()
    # As transformers does: tokens that have a role are special even if tokenizer.json does not say so.
    known = [token for token in special_tokens.values() if backend.token_to_id(token) is not None]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    added = [AddedToken(token, special=True, normalized=False) for token in known if token not in special]
    backend.add_special_tokens(added)
    return backend


def _special_tokens(settings: Mapping[str, object], path: Path) -> dict[str, str]:
    """Tokens by role; each is written as a string or as {"content": string}."""
    tokens: dict[str, str] = {}
    for role in _ROLES:
        match settings.get(role):
            case None:
                continue
            case str(content) | {"content": str(content)}:
                tokens[role] = content
            case other:
                raise ConfigError(f"{path}: {role} must be a string, got {other!r}", param="model")
    return tokens
