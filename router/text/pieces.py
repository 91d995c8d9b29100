"""How a tokenizer.json's decoder turns one vocabulary entry into bytes, independently of its neighbours.

Every decoder in use by language models concatenates what its entries stand for; only the beginning of a text is special
(sentencepiece strips the space that its encoder put there). Bytes instead of text make streaming exact: a character
whose bytes lie in several tokens needs no second decoding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.errors import ConfigError

#: What sentencepiece writes for a space.
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """`rewrite` runs over an entry in order, `to_bytes` then gives its bytes."""

    rewrite: tuple[Callable[[str], str], ...] = ()
    to_bytes: Callable[[str], bytes] = str.encode
    #: Number of leading spaces that a text loses at its very beginning.
    strip_start: int = 0

    def __call__(self, piece: str) -> bytes:
        for rewrite in self.rewrite:
            piece = rewrite(piece)
        return self.to_bytes(piece)


def piece_decoder(spec: object) -> PieceDecoder:
    """The decoder that the "decoder" value of a tokenizer.json describes.

    Raises:
        ConfigError: a decoder whose text depends on neighbouring tokens.
    """
    if spec is None:  # tokens are words, joined by spaces
        return PieceDecoder((lambda piece: " " + piece,), strip_start=1)
    steps = _steps(spec)
    rewrite: list[Callable[[str], str]] = []
    to_bytes: Callable[[str], bytes] = str.encode
    strip_start = 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                to_bytes = _byte_level
            case {"type": "ByteFallback"}:
                to_bytes = _byte_fallback
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                rewrite.append(_replacing(old, new))
            case {"type": "Metaspace", **options}:
                rewrite.append(_replacing(str(options.get("replacement", _METASPACE)), " "))
                strip_start = 0 if options.get("prepend_scheme", "always") == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip_start = start
            case _:
                raise ConfigError(f"tokenizer.json has a decoder that is not supported: {step}", param="model")
    return PieceDecoder(tuple(rewrite), to_bytes, strip_start)


def _steps(spec: object) -> list[object]:
    """The decoders of a sequence, nested ones included."""
    match spec:
        case {"type": "Sequence", "decoders": list(decoders)}:
            return [step for decoder in decoders for step in _steps(decoder)]
        case _:
            return [spec]


def _replacing(old: str, new: str) -> Callable[[str], str]:
    return lambda piece: piece.replace(old, new)


def _byte_level_alphabet() -> Mapping[str, int]:
    """GPT-2's stand-in character of every byte: printable ones stand for themselves, the rest are moved above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level(piece: str) -> bytes:
    """An entry with a character outside the alphabet is an added token, written as it is."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def _byte_fallback(piece: str) -> bytes:
    """`<0xE2>` is a byte, everything else is text."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])
        except ValueError:
            pass
    return piece.encode()
