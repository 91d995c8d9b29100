"""What requests are meant to keep to (service level objectives), and how many do: goodput is the rate of those.

The two objectives are DistServe's (arXiv 2401.09670): time to first token, and time per output token.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objectives:
    """None: there is no such objective."""

    #: Arrival to first token, in seconds.
    ttft_s: float | None = None
    #: Between the tokens of a choice, in seconds.
    itl_s: float | None = None


@dataclass(slots=True)
class Tally:
    """Requests by whether they kept to one objective."""

    met: int = 0
    missed: int = 0

    def count(self, *, met: bool) -> None:
        """One more."""
        self.met += met
        self.missed += not met


class Attainment:
    """Counts requests by whether they kept to their objectives; written by one thread, readable by any.

    A request keeps to the ITL objective if the mean time between the tokens of each of its choices does, so that one
    late token does not spoil a stream that is fast enough. Those that fail have missed everything; those that are
    aborted are not counted, and neither are those that were refused, which `Admission` counts.
    """

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self.ttft = Tally()
        self.itl = Tally()
        #: Both: what goodput is.
        self.all = Tally()

    @property
    def enabled(self) -> bool:
        """There is an objective."""
        return self._objectives != Objectives()

    def finished(self, ttft_s: float, worst_itl_s: float) -> None:
        """All choices of a request have ended by themselves."""
        ttft, itl = self._objectives.ttft_s, self._objectives.itl_s
        self._count(in_time=ttft is None or ttft_s <= ttft, steady=itl is None or worst_itl_s <= itl)

    def failed(self) -> None:
        """A request has ended in an error."""
        self._count(in_time=False, steady=False)

    def _count(self, *, in_time: bool, steady: bool) -> None:
        if not self.enabled:
            return
        if self._objectives.ttft_s is not None:
            self.ttft.count(met=in_time)
        if self._objectives.itl_s is not None:
            self.itl.count(met=steady)
        self.all.count(met=in_time and steady)
