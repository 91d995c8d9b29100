"""Random requests for `moerelay verify`: a pure function of the seed, so that two runs can be compared."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.routing.record import RoutingArray
from deploy.verify.case import MAX_USER_TURN, Case, CaseLimits, FirstTurn, Form, Wire
from deploy.verify.draw import draw_sampling

#: Lengths around the edges of blocks of 16 tokens, where off-by-one errors live.
_EDGE_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33)
#: Each so many requests, one repeats its predecessor in another form, and one goes on where its predecessor ended.
_REPEAT_EVERY = 5
_CONTINUE_EVERY, _CONTINUE_AT = 10, 7
_NUM_SHARED_PREFIXES = 2


def make_case(seed: int, index: int, limits: CaseLimits) -> Case:
    """Request number `index` of the run that `seed` names; what it is by itself if it could continue another one."""
    if index % _REPEAT_EVERY == _REPEAT_EVERY - 1:
        previous = make_case(seed, index - 1, limits)
        forms = list(Form)
        return _in_form(replace(previous, index=index), forms[(forms.index(previous.form) + 1) % len(forms)])
    rng = _rng(seed, index)
    prompt = _prompt(rng, seed, limits)
    asked = rng.choice((1, 2, limits.max_output, rng.randint(1, limits.max_output)))
    asked, sampling, text = draw_sampling(rng, seed, index, len(prompt), asked, limits)
    case = Case(
        index=index,
        prompt=prompt,
        sampling=sampling,
        asked_max_tokens=asked,
        routing_start=rng.choice((0, 0, 0, len(prompt), rng.randint(0, len(prompt)))),
        form=Form.WHOLE,
        text=text,
        wire=_wire(rng),
    )
    return _in_form(case, rng.choice(list(Form)))


def conversations(seed: int, num_requests: int, limits: CaseLimits) -> Iterator[list[Case]]:
    """All requests: alone, or with the one that goes on from its answer (`continued`)."""
    index = 0
    while index < num_requests:
        has_next = (index + 1) % _CONTINUE_EVERY == _CONTINUE_AT and index + 1 < num_requests
        turns = range(index, index + 1 + has_next)
        yield [make_case(seed, turn, limits) for turn in turns]
        index = turns.stop


def continued(
    case: Case, seed: int, first: Case, token_ids: Sequence[int], rows_TLK: RoutingArray | None, limits: CaseLimits
) -> Case:
    """`case` as the second turn after `first`, whose answer had these tokens and rows.

    The prompt is the conversation so far and sometimes a few tokens of the user; rows are asked for from the last token
    on, which got none in the first turn. Where there is no room for that, `case` stays by itself.
    """
    rng = _rng(seed, case.index)
    total = len(first.prompt) + len(token_ids)
    user = [rng.randrange(limits.vocab_size) for _ in range(rng.choice((0, 0, 1, MAX_USER_TURN)))]
    prompt = (*first.prompt, *token_ids, *user)
    room = limits.max_model_len - len(prompt)
    if room < 1:
        return case
    max_tokens = min(case.sampling.max_tokens, room)
    return replace(
        case,
        prompt=prompt,
        sampling=replace(case.sampling, max_tokens=max_tokens, min_tokens=min(case.sampling.min_tokens, max_tokens)),
        asked_max_tokens=max_tokens,
        routing_start=total - 1,
        first_turn=None if rows_TLK is None else FirstTurn(first.routing_start, rows_TLK),
    )


def _rng(seed: int, index: int) -> random.Random:
    return random.Random(f"{seed}:{index}")


def _in_form(case: Case, form: Form) -> Case:
    """Events say nothing of prompt logprobs."""
    if form is not Form.WHOLE:
        case = replace(case, sampling=replace(case.sampling, prompt_logprobs=None))
    return replace(case, form=form)


def _prompt(rng: random.Random, seed: int, limits: CaseLimits) -> tuple[int, ...]:
    """Sometimes of an edge length, sometimes with a beginning that other prompts share."""
    longest = min(limits.max_prompt, limits.max_model_len - 1)
    length = min(longest, rng.choice(_EDGE_LENGTHS)) if rng.random() < 0.25 else rng.randint(1, longest)
    own = [rng.randrange(limits.vocab_size) for _ in range(length)]
    if rng.random() < 0.4:
        shared = random.Random(f"{seed}:prefix:{rng.randrange(_NUM_SHARED_PREFIXES)}")
        num_shared = rng.randint(0, length)
        own[:num_shared] = [shared.randrange(limits.vocab_size) for _ in range(num_shared)]
    return tuple(own)


def _wire(rng: random.Random) -> Wire:
    return Wire(
        rows_format="dict" if rng.random() < 0.25 else "npy",
        wants_rows=rng.random() < 0.95,
        return_token_ids=rng.random() < 0.2,
        max_event_bytes=rng.choice((None, None, 1024, 4096)),
        cache_salt=rng.choice((None, None, None, None, "a", "b")),
        priority=rng.choice((0, 0, -1, 5)),
    )
