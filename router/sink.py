"""Whom the run of a prompt tells: who receives what is generated, and who counts where it was."""

from typing import Protocol

from common.pb import prefill_pb2
from router.chunk import Chunk
from router.plan import Plan


class Sink(Protocol):
    """Receives the chunks of a prompt's choices, those of one choice in order."""

    async def take(self, plan: Plan, chunk: Chunk) -> bool:
        """The pipeline waits for it, so a slow client slows its decode call down.

        True: the choice has ended, by the chunk's finish reason or by what the text says.
        """
        ...

    def take_now(self, plan: Plan, chunk: Chunk) -> bool:
        """Takes a chunk as `take` would, if that neither waits nor ends the choice; False: it is for `take`."""
        ...


class Observer(Protocol):
    """Is told where prompts were computed."""

    def placed(self, took_s: float) -> None:
        """Workers for a prompt were found and can be reached."""
        ...

    def prefilled(self, reply: prefill_pb2.PrefillReply) -> None:
        """A prefill worker has handed a prompt over."""
        ...

    def fell_back(self) -> None:
        """A prompt goes to a decode worker as a whole, because no prefill worker is healthy."""
        ...
