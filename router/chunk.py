"""What a decode worker streams, and what the router passes on: plain records, made once per event of every stream."""

import msgspec

from common.messages import finish_from_pb, tokens_from_pb
from common.pb import decode_pb2
from common.sampling import Finish, FinishReason, SampledToken


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """New tokens and rows of one choice. `rows` are C-order little-endian [num_rows, L, K] bytes."""

    tokens: tuple[SampledToken, ...] = ()
    rows: bytes = b""
    num_rows: int = 0
    finish: Finish | None = None
    num_cached_tokens: int = 0
    #: Index below the n of the chunk's prompt.
    choice: int = 0
    #: Packed as in `common.prompt_logprobs`, of the next prompt positions.
    prompt_logprobs: bytes = b""
    #: The tokens have neither logprobs nor masks, and are all of the same weights; False says nothing.
    is_plain: bool = False

    def cut(self, num_tokens: int, finish: Finish) -> "Chunk":
        """The same up to its `num_tokens`-th token (at least one), which ends the choice.

        Each token that goes takes one row along: the row of the position before it.
        """
        assert 0 < num_tokens <= len(self.tokens), "a choice ends at one of the chunk's tokens"
        num_rows = max(0, self.num_rows - (len(self.tokens) - num_tokens))
        row_bytes = len(self.rows) // self.num_rows if self.num_rows else 0
        return Chunk(
            tokens=self.tokens[:num_tokens],
            rows=self.rows[: num_rows * row_bytes],
            num_rows=num_rows,
            finish=finish,
            num_cached_tokens=self.num_cached_tokens,
            choice=self.choice,
            prompt_logprobs=self.prompt_logprobs,
            is_plain=self.is_plain,
        )


def aborted(choice: int) -> Chunk:
    """How a choice ends that was aborted before any worker heard of it."""
    return Chunk(finish=Finish(FinishReason.ABORT), choice=choice)


def chunk_from_pb(message: decode_pb2.TokenChunk) -> Chunk:
    return Chunk(
        tokens=tokens_from_pb(message),
        rows=message.routing_rows,
        num_rows=message.num_rows,
        finish=_finish(message) if message.finish_reason else None,
        num_cached_tokens=message.num_cached_tokens,
        choice=message.choice,
        prompt_logprobs=message.prompt_logprobs,
        is_plain=bool(message.token_ids),
    )


def _finish(message: decode_pb2.TokenChunk) -> Finish | None:
    reason = finish_from_pb(message.finish_reason)
    if reason is None:
        return None
    return Finish(reason, message.stop_token_id if message.HasField("stop_token_id") else None)
