"""Names of token prefixes: one digest per full block, each over everything before it and the same in every process."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(frozen=True, slots=True)
class Scope:
    """What must be equal, beside the tokens, for two prefixes to have the same KV and to be shared."""

    weight_version: str
    #: Of the request; prefixes with different salts are kept apart.
    salt: str = ""

    def digest(self) -> bytes:
        """Of no tokens at all. Lengths go in front, so that no two scopes are spelled the same."""
        parts = [text.encode("utf-8", "surrogatepass") for text in (self.weight_version, self.salt)]
        return xxhash.xxh3_128_digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


class TokenChain:
    """The full blocks of one growing token sequence.

    The digest of a block is xxh3-128 over the digest before it and the block's ids, four bytes each, little-endian
    (the chain of vLLM's prefix cache, with a hash that no process seeds). A digest finds a block; because digests may
    collide, and on purpose, `tokens` decide whether it is the one.

    Attributes:
        digests: one of each full block.
        tokens: the bytes of each full block's ids.
    """

    __slots__ = ("_block_size", "digests", "scope", "tokens")

    def __init__(self, scope: Scope, block_size: int) -> None:
        self.scope = scope
        self.digests: list[bytes] = []
        self.tokens: list[bytes] = []
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self.digests)

    def grow(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Adds the blocks that the sequence's first `num_tokens` ids have filled since the last call."""
        start, end = len(self) * self._block_size, num_tokens - num_tokens % self._block_size
        if start >= end:
            return
        packed = np.asarray(token_ids[start:end], "<u4").tobytes()
        digest = self.digests[-1] if self.digests else self.scope.digest()
        width = 4 * self._block_size
        for at in range(0, len(packed), width):
            block = packed[at : at + width]
            digest = digest_after(digest, block)
            self.digests.append(digest)
            self.tokens.append(block)

    def fork(self, num_blocks: int) -> "TokenChain":
        """The chain of another sequence that begins with the same blocks."""
        twin = TokenChain(self.scope, self._block_size)
        twin.digests, twin.tokens = self.digests[:num_blocks], self.tokens[:num_blocks]
        return twin


def digest_after(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a block, given that of everything before it."""
    return xxhash.xxh3_128_digest(parent + tokens)
