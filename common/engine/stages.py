"""How long a request spends in each stage of an engine, told as it happens."""

from common.engine.request import RequestId


class StageObserver:
    """Is told on the engine thread, and so must return at once; this one ignores what it hears.

    All times are in seconds. A stage that a request does not come to the end of is not told.
    """

    def seated(self, request_id: RequestId, waited_s: float) -> None:
        """The request has its seat and blocks, after it waited for them."""

    def prefilled(self, request_id: RequestId, took_s: float) -> None:
        """The prompt was computed here: from its seat to its first token."""

    def handed_over(self, request_id: RequestId, took_s: float) -> None:
        """The prompt was computed elsewhere: from its seat to the engine's taking it over."""

    def decoded(self, request_id: RequestId, took_s: float) -> None:
        """A choice of more than one token has ended by itself: from its first token to its last."""
