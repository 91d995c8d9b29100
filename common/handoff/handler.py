"""What a decode worker (D) does with what becomes of handoffs; the engine's side of `receiver`."""

from collections.abc import Sequence
from typing import Protocol

from common.engine.request import RequestId
from common.errors import HandoffError
from common.prompt_logprobs import PromptLogprobs
from common.sampling import SampledToken


class HandoffHandler(Protocol):
    """Who is told what became of a lease. Called on the event loop; must not block.

    After `on_complete` and `on_failed` nothing touches the lease's blocks any more. A revoked lease makes no calls.
    """

    def on_advanced(self, request_id: RequestId, computed: int) -> None:
        """KV and rows of positions [0, computed) are in their slots."""
        ...

    def on_prompt_logprobs(self, request_id: RequestId, entries: PromptLogprobs) -> None:
        """Those of the prompt's next positions; all of them have come before `on_complete`."""
        ...

    def on_complete(self, request_id: RequestId, first_tokens: Sequence[SampledToken], num_cached: int) -> None:
        """The whole prompt is there, and the token that follows it, for each choice.

        `num_cached`: prompt tokens that P did not compute for this request, because it had them.
        """
        ...

    def on_failed(self, request_id: RequestId, error: HandoffError) -> None:
        """The handoff ended early."""
        ...
