"""What a JSON text costs to parse and to validate, found without parsing it."""

#: What a key, an object or an array costs, in values: each becomes an object that is looked at more than once.
CONTAINER_VALUES = 20

#: Looked at in one step; other threads run in between.
_STEP_BYTES = 256 * 1024


def costs_more(body: bytes, max_values: int) -> bool:
    """Whether the text has more values than that. What is within strings costs nothing."""
    if len(body) // 2 + CONTAINER_VALUES * _num_containers(body) <= max_values:
        return False  # even if every other byte is a comma
    return _cost(body) > max_values and _cost_without_strings(body, max_values) > max_values


def _cost(text: bytes) -> int:
    return text.count(b",") + CONTAINER_VALUES * _num_containers(text)


def _num_containers(text: bytes) -> int:
    return text.count(b":") + text.count(b"{") + text.count(b"[")


def _cost_without_strings(body: bytes, enough: int) -> int:
    """Ends as soon as it is above `enough`. Of what is no JSON, right as far as a parser comes."""
    cost, within, cut = 0, False, b""
    for start in range(0, len(body), _STEP_BYTES):
        piece = cut + body[start : start + _STEP_BYTES]
        # What a backslash at the end escapes is in the next piece.
        cut = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        parts = piece[: len(piece) - len(cut)].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        cost += _cost(b"".join(parts[within::2]))
        if cost > enough:
            break
        within ^= len(parts) % 2 == 0
    return cost
