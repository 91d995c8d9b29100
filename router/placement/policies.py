"""The policies by the names that `--placement` takes."""

from collections.abc import Callable, Mapping

from common.setting_types import PlacementName
from router.placement.least_loaded import LeastLoaded
from router.placement.policy import Policy
from router.placement.prefix_affinity import PrefixAffinity
from router.placement.round_robin import RoundRobin
from router.placement.session_affinity import SessionAffinity
from router.placement.two_choices import TwoChoices

POLICIES: Mapping[PlacementName, Callable[[], Policy]] = {
    "prefix": PrefixAffinity,
    "session": SessionAffinity,
    "least_loaded": LeastLoaded,
    "two_choices": TwoChoices,
    "round_robin": RoundRobin,
}


def policy(name: PlacementName, *, max_prefixes: int) -> Policy:
    """A new one, that remembers nothing yet and at most so many prefixes ever."""
    return PrefixAffinity(max_prefixes) if name == "prefix" else POLICIES[name]()
