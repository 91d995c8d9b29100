"""What a request's outbox holds, as messages: the chunks of its choices until each of them has ended."""

from collections.abc import Callable, Iterator, Sequence

from common.pb import decode_pb2, types_pb2
from decode_worker.chunks import Chunker
from decode_worker.outbox import Batch

#: Is told, with a choice's first tokens, how many prompt tokens were not computed for the request.
OnFirstTokens = Callable[[int], None]


class Answer:
    """Every chunk of one request goes through this once."""

    def __init__(self, num_choices: int, on_first_tokens: OnFirstTokens) -> None:
        self._chunkers = [Chunker() for _ in range(num_choices)]
        self._on_first_tokens: OnFirstTokens | None = on_first_tokens
        #: Choices whose finish reason has not been cut yet.
        self.num_open = num_choices

    def cut(self, batches: Sequence[Batch]) -> Iterator[decode_pb2.TokenChunk]:
        """All of the batches, chunk by chunk: what is large is not copied before it is wanted."""
        for batch in batches:
            if batch.tokens and self._on_first_tokens is not None:
                self._on_first_tokens(batch.num_cached)
                self._on_first_tokens = None
            for chunk in self._chunkers[batch.choice].cut(batch):
                # Before it is handed out: whoever takes the last chunk may not ask for another.
                self.num_open -= chunk.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
                yield chunk
