"""Where prompts go: every policy over candidates that a test makes up, and over a router with fake workers."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.setting_types import PlacementName
from router.placement.least_loaded import LeastLoaded
from router.placement.policies import POLICIES
from router.placement.prefix_affinity import PrefixAffinity
from router.placement.prefix_memory import PrefixMemory
from router.placement.rendezvous import highest, within_bound
from router.placement.round_robin import RoundRobin
from router.placement.session_affinity import SessionAffinity
from router.placement.subject import Candidate, Subject
from router.placement.two_choices import TwoChoices
from tests.e2e.cluster import until
from tests.fakes.fake_workers import Script
from tests.unit.router.cluster import Cluster, running

BLOCK = 4


def idle(num_workers: int) -> list[Candidate]:
    return [Candidate(f"w{i}", 0) for i in range(num_workers)]


def loaded(*loads: int) -> list[Candidate]:
    return [Candidate(f"w{i}", load) for i, load in enumerate(loads)]


def prompt(*token_ids: int, salt: str = "") -> Subject:
    return Subject(token_ids, block_size=BLOCK, salt=salt)


def conversation(number: int, num_blocks: int) -> Subject:
    """So many full blocks that no other conversation has, and one token."""
    return prompt(*(1000 * number + at for at in range(num_blocks * BLOCK)), 1)


NOTHING = Subject()


def test_round_robin_takes_turns_whatever_the_load() -> None:
    policy = RoundRobin()
    assert [policy.choose(loaded(9, 0, 5), NOTHING) for _ in range(6)] == ["w0", "w1", "w2"] * 2


def test_round_robin_goes_on_without_who_left_and_with_who_came() -> None:
    policy = RoundRobin()
    assert [policy.choose(idle(3), NOTHING) for _ in range(4)] == ["w0", "w1", "w2", "w0"]
    assert [policy.choose(idle(2), NOTHING) for _ in range(2)] == ["w1", "w0"]
    assert [policy.choose(idle(3), NOTHING) for _ in range(3)] == ["w2", "w1", "w0"]


def test_the_least_loaded_then_the_longest_unused() -> None:
    policy = LeastLoaded()
    assert policy.choose(loaded(3, 1, 2), NOTHING) == "w1"
    assert [policy.choose(loaded(1, 1, 2), NOTHING) for _ in range(3)] == ["w0", "w1", "w0"]


def test_two_choices_never_takes_the_most_loaded_of_three() -> None:
    policy = TwoChoices(Random(5))
    chosen = Counter(policy.choose(loaded(0, 5, 9), NOTHING) for _ in range(600))
    assert "w2" not in chosen
    assert chosen["w0"] > chosen["w1"] > 100  # w0 wins two of the three pairs


def test_two_choices_of_one() -> None:
    assert TwoChoices().choose(idle(1), NOTHING) == "w0"


def test_the_next_turn_goes_where_the_conversation_is() -> None:
    policy = PrefixAffinity()
    first = {number: policy.choose(idle(4), conversation(number, 3)) for number in range(40)}
    assert len(set(first.values())) == 4
    for number, worker in first.items():
        assert policy.choose(idle(4), conversation(number, 9)) == worker


def test_prompts_that_share_half_of_their_beginning_go_together() -> None:
    policy = PrefixAffinity()
    shared = [7] * (8 * BLOCK)
    first = policy.choose(idle(4), prompt(*shared, *range(20)))
    others = {policy.choose(idle(4), prompt(*shared, *range(100 * i, 100 * i + 20))) for i in range(1, 30)}
    assert others == {first}


def test_salts_keep_prefixes_apart() -> None:
    assert not set(prompt(*range(20), salt="a").digests) & set(prompt(*range(20), salt="b").digests)


def test_no_worker_gets_a_quarter_more_than_the_mean_because_of_a_prefix() -> None:
    policy, loads = PrefixAffinity(), Counter({f"w{i}": 0 for i in range(4)})
    for _ in range(100):
        loads[policy.choose([Candidate(key, load) for key, load in loads.items()], conversation(1, 5))] += 1
    assert max(loads.values()) <= 32  # 1.25 times 25, rounded up
    assert min(loads.values()) > 0


def test_a_restarted_worker_is_another_one() -> None:
    """Its cache is empty; what was there goes to whoever comes next by the hash, and stays there."""
    policy = PrefixAffinity()
    before = {number: policy.choose(idle(3), conversation(number, 3)) for number in range(60)}
    anew = [Candidate("w0", 0), Candidate("w1", 0), Candidate("w2 again", 0)]
    after = {number: policy.choose(anew, conversation(number, 3)) for number in range(60)}
    kept = [number for number in before if before[number] != "w2"]
    assert all(after[number] == before[number] for number in kept)
    assert {after[number] for number in before if before[number] == "w2"} == {"w0", "w1", "w2 again"}


def test_routers_that_share_nothing_agree_about_new_prompts() -> None:
    one, other = PrefixAffinity(), PrefixAffinity()
    chosen = [(one.choose(idle(5), conversation(n, 3)), other.choose(idle(5), conversation(n, 3))) for n in range(50)]
    assert all(a == b for a, b in chosen)
    assert len({a for a, _ in chosen}) == 5


def test_short_prompts_go_to_the_least_loaded() -> None:
    assert PrefixAffinity().choose(loaded(2, 0, 1), prompt(*range(BLOCK))) == "w1"


def test_the_last_token_counts_for_no_block() -> None:
    """It is always computed, so that a prompt of one block shares nothing."""
    assert [len(prompt(*range(n)).digests) for n in (0, 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)] == [
        *(0, 0, 0, 1, 1, 2)
    ]


def test_digests_name_everything_before_them() -> None:
    one, other = prompt(*range(13)).digests, prompt(9, *range(1, 13)).digests
    assert len({*one, *other}) == 6
    assert prompt(*range(9)).digests == one[:2]


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = PrefixMemory(max_prefixes=10)
    for number in range(1000):
        memory.remember([number], "w0")
    assert len(memory) == 10
    assert memory.longest([989], {"w0"}) == ()
    assert memory.longest([990], {"w0"}) == ["w0"]


def test_what_is_used_is_kept() -> None:
    memory = PrefixMemory(max_prefixes=2)
    for digest in (1, 2, 1, 3):
        memory.remember([digest], "w0")
    assert (memory.longest([1], {"w0"}), memory.longest([2], {"w0"})) == (["w0"], ())


def test_memory_of_one_prefix_is_bounded_too() -> None:
    memory = PrefixMemory()
    for number in range(100):
        memory.remember([1], f"w{number}")
    everybody = {f"w{number}" for number in range(100)}
    assert list(memory.longest([1], everybody)) == [f"w{number}" for number in range(99, 83, -1)]


def test_the_longest_beginning_counts() -> None:
    memory = PrefixMemory()
    memory.remember([1, 2, 3], "deep")
    memory.remember([1], "shallow")
    assert memory.longest([1, 2, 3, 4], {"deep", "shallow"}) == ["deep"]
    assert memory.longest([1, 9], {"deep", "shallow"}) == ["shallow", "deep"]
    assert memory.longest([1, 2, 3, 4], {"shallow"}) == ["shallow"]


def test_a_session_stays_at_one_worker_and_routers_agree() -> None:
    subjects = [Subject(range(n), session=f"s{n % 10}") for n in range(100)]
    chosen = {(subject.session, policy.choose(idle(4), subject)) for subject in subjects for policy in _two_routers()}
    assert len(chosen) == 10
    assert len({worker for _, worker in chosen}) > 1


def _two_routers() -> tuple[SessionAffinity, SessionAffinity]:
    return SessionAffinity(), SessionAffinity()


def test_a_session_leaves_a_worker_that_has_half_more_than_the_mean() -> None:
    subject = Subject(session="a")
    home = SessionAffinity().choose(idle(2), subject)
    busy = [Candidate(c.key, 12 if c.key == home else 10) for c in idle(2)]
    assert SessionAffinity().choose(busy, subject) == home
    overloaded = [Candidate(c.key, 22 if c.key == home else 0) for c in idle(2)]
    assert SessionAffinity().choose(overloaded, subject) != home


def test_without_a_session_the_least_loaded() -> None:
    assert SessionAffinity().choose(loaded(1, 0), NOTHING) == "w1"


def test_a_worker_that_goes_moves_only_what_it_had() -> None:
    before = {digest: highest(idle(5), digest).key for digest in range(1, 500)}
    after = {digest: highest(idle(4), digest).key for digest in range(1, 500)}
    assert all(after[digest] == key for digest, key in before.items() if key != "w4")
    shares = Counter(before.values())
    assert min(shares.values()) > 60  # 100 each, give or take four standard deviations


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.sampled_from([0.0, 0.25, 0.5]))
def test_somebody_is_always_within_the_bound(loads: Sequence[int], excess: float) -> None:
    free = within_bound(loaded(*loads), excess)
    assert free
    assert all(candidate.load < (1 + excess) * (sum(loads) + 1) / len(loads) for candidate in free)


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 40))
def test_every_policy_chooses_one_of_the_candidates(name: PlacementName, loads: Sequence[int], length: int) -> None:
    policy = POLICIES[name]()
    for session in (None, "a"):
        subject = Subject(range(length), block_size=BLOCK, session=session)
        assert policy.choose(loaded(*loads), subject) in {f"w{i}" for i in range(len(loads))}


async def turns(cluster: Cluster, headers: dict[str, str] | None = None) -> tuple[list[int], list[int]]:
    """Six turns of one conversation; how many each prefill and each decode worker got."""
    token_ids = list(range(3, 40))
    for turn in range(6):
        body = {"token_ids": [*token_ids, *[9] * 3 * turn], "sampling_params": {"max_tokens": 1}}
        assert (await cluster.post(body, headers=headers))[0] == 200
    prefilled = [len(worker.prefill_requests) for worker in cluster.prefill]
    return sorted(prefilled), sorted(len(worker.decode_requests) for worker in cluster.decode)


async def test_by_default_a_conversation_stays_with_its_prefill_and_its_decode_worker() -> None:
    async with running(prefill=2, decode=3, heartbeat_interval_s=60) as cluster:
        assert await turns(cluster) == ([0, 6], [0, 0, 6])


@pytest.mark.parametrize(
    ("name", "headers", "expected"),
    [
        ("round_robin", None, ([3, 3], [2, 2, 2])),
        ("least_loaded", None, ([3, 3], [2, 2, 2])),
        ("session", {"X-Session-Id": "mine"}, ([0, 6], [0, 0, 6])),
        ("session", None, ([3, 3], [2, 2, 2])),
    ],
)
async def test_the_flag_chooses_the_policy(
    name: str, headers: dict[str, str] | None, expected: tuple[list[int], list[int]]
) -> None:
    async with running(prefill=2, decode=3, placement=name, heartbeat_interval_s=60) as cluster:
        assert await turns(cluster, headers) == expected


async def test_prompts_that_come_at_once_count_before_they_begin() -> None:
    """The bound holds for a burst too, although no worker has heard of any of them when the last one is placed."""
    script = Script(hold_after=0)
    async with running(script, both=True, decode=2, heartbeat_interval_s=60) as cluster:
        body = {"token_ids": list(range(3, 40)), "sampling_params": {"max_tokens": 1}}
        requests = [asyncio.ensure_future(cluster.post(body)) for _ in range(16)]

        async def all_have_come() -> bool:
            return sum(len(worker.decode_requests) for worker in cluster.decode) == 16

        await until(all_have_come)
        counts = sorted(len(worker.decode_requests) for worker in cluster.decode)
        script.release.set()
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 16
        assert counts[1] <= 10  # 1.25 times the mean of 8
