"""Which cpus and how many engine threads each worker of a local cluster gets. Pure: the machine is an argument."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.cores import Cores
from common.cpu_list import format_cpus
from common.errors import ConfigError

#: From so many cores on, one is left to the router and whatever else is not an engine: it costs little there, and a
#: step waits for the one thread that lost its core to them. Hyperthreads take that part where there are any.
RESERVE_FROM = 8


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker gets; `cpus` is empty where it is not pinned."""

    cpus: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class CorePlan:
    """One share per worker, in order, and what the user should know about them."""

    shares: tuple[Share, ...]
    warnings: tuple[str, ...] = ()


def plan_cores(cores: Cores, threads: Sequence[int | None]) -> CorePlan:
    """Splits `cores` among workers, of which each asks for a number of engine threads, or for its part (None).

    Every worker gets whole cores of its own, as many as its threads need and the rest in proportion to them; those
    that come first get what is left over. Where the cores do not suffice they are shared, and a warning says so.

    Raises:
        ConfigError: a worker asks for more threads than there are cpus.
    """
    for count in threads:
        if count is not None and count > len(cores.cpus):
            raise ConfigError(
                f"--threads {count}: there are only {len(cores.cpus)} cpus ({format_cpus(cores.cpus)}) for a worker"
            )
    if not cores.can_pin:
        return _unpinned(cores, threads)
    needs = [-(-(count or 1) // _narrowest(cores)) for count in threads]
    num_cores = len(cores.cpus_of_core)
    if sum(needs) <= num_cores:
        return _side_by_side(cores, threads, needs)
    if any(threads):
        total = sum(count or 1 for count in threads)
        warning = (
            f"--threads: {total} threads of {len(threads)} workers share {len(cores.cpus)} cpus, and none is pinned"
        )
        return CorePlan(tuple(Share((), count or 1) for count in threads), (warning,))
    warning = f"{len(threads)} workers share {num_cores} {'cores' if num_cores > 1 else 'core'}; fewer would be faster"
    places = (cores.cpus_of_core[i * num_cores // len(threads)] for i in range(len(threads)))
    return CorePlan(tuple(Share(place, 1) for place in places), (warning,))


def _narrowest(cores: Cores) -> int:
    return min(len(core) for core in cores.cpus_of_core)


def _side_by_side(cores: Cores, threads: Sequence[int | None], needs: list[int]) -> CorePlan:
    num_cores = len(cores.cpus_of_core)
    reserved = num_cores >= RESERVE_FROM and _narrowest(cores) == 1 and sum(needs) < num_cores
    counts = _grow(needs, num_cores - reserved)
    paid = _paid(cores, len(threads))
    shares, start = [], 0
    for count, wanted, quota in zip(counts, threads, paid, strict=True):
        mine = cores.cpus_of_core[start : start + count]
        shares.append(Share(Cores(mine).cpus, wanted or min(count, quota)))
        start += count
    return CorePlan(tuple(shares), _over_quota(cores, shares))


def _grow(needs: Sequence[int], total: int) -> list[int]:
    """Adds to `needs` until they sum to `total`, each time where least was given in proportion; earlier ones first."""
    counts = list(needs)
    while sum(counts) < total:
        poorest = min(range(len(counts)), key=lambda i: counts[i] / needs[i])
        counts[poorest] += 1
    return counts


def _unpinned(cores: Cores, threads: Sequence[int | None]) -> CorePlan:
    paid = _paid(cores, len(threads))
    shares = tuple(Share((), wanted or part) for wanted, part in zip(threads, paid, strict=True))
    return CorePlan(shares, _over_quota(cores, shares))


def _paid(cores: Cores, num_workers: int) -> list[int]:
    """Threads per worker that cores and quota pay for; at least one each."""
    is_tight = cores.quota is not None or _narrowest(cores) == 1
    total = cores.num_threads - (is_tight and cores.num_threads >= RESERVE_FROM)
    return [max(1, total // num_workers + (i < total % num_workers)) for i in range(num_workers)]


def _over_quota(cores: Cores, shares: Sequence[Share]) -> tuple[str, ...]:
    total = sum(share.threads for share in shares)
    if cores.quota is None or total <= cores.quota:
        return ()
    return (f"{total} engine threads exceed the cpu limit of {cores.quota:g}: everything will stand still at times",)
