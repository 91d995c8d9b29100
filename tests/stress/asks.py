"""Random prompts and sampling parameters of all kinds, many of which begin alike or end at an edge of a block."""

from dataclasses import dataclass, replace
from random import Random

from common.engine.grammar import GrammarMatcher
from common.sampling import SamplingParams
from tests.stress.model import GRAMMAR, StressModel

#: Lengths around the edges of blocks of 4 and 16, of a window of 8, and of a tile of 256 keys.
EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 32, 33, 40, 47, 48, 49)
LONG_EDGES = (239, 240, 241, 252, 254, 255, 256, 257, 258, 260, 271, 272, 273)


@dataclass(frozen=True, eq=False)
class Ask:
    """What decides about a solo run. Two are never equal: an oracle may keep what it found out about each."""

    prompt: list[int]
    sampling: SamplingParams
    matcher: GrammarMatcher | None

    @property
    def num_slots(self) -> int:
        """Positions that one choice may need."""
        return len(self.prompt) + self.sampling.max_tokens - 1


def draw_asks(random: Random, model: StressModel, count: int, *, long: bool) -> list[Ask]:
    """Some of the prompts share beginnings; `long` ones are about as long as a tile of attention."""
    edges = LONG_EDGES if long else EDGES
    beginnings = [_ids(random, model, edges[-1]) for _ in range(2)]
    asks = []
    for _ in range(count):
        length = random.choice(edges) if random.random() < 0.7 else random.randint(1, edges[-1])
        beginning = random.choice(beginnings)[: random.choice((0, length, length, random.choice(edges)))]
        prompt = (beginning + _ids(random, model, length))[:length]
        sampling = draw_sampling(random, model, max_tokens=8 if long else 24)
        asks.append(Ask(prompt, sampling, model.matcher if sampling.grammar else None))
    return asks


def draw_sampling(random: Random, model: StressModel, *, max_tokens: int) -> SamplingParams:
    """Half of them greedy or plain; each of the others has a few of the many wishes."""
    plain = SamplingParams(
        max_tokens=1 if random.random() < 0.05 else random.randint(2, max_tokens),
        temperature=random.choice((0, 0.7, 1.0, 1.5)),
        seed=random.choice((0, 7, -(2**63), 2**63 - 1, random.randint(-1000, 1000))),
        n=random.choice((1, 1, 1, 2, 3, 4)),
        logprobs=random.choice((None, None, 0, 3)),
        prompt_logprobs=random.choice((None,) * 6 + (0, 2)),
        ignore_eos=random.random() < 0.5,
    )
    if random.random() < 0.5:
        return plain
    if random.random() < 0.15:
        return replace(plain, grammar=GRAMMAR, ignore_eos=False)
    return _shaped(random, model, plain)


def _shaped(random: Random, model: StressModel, plain: SamplingParams) -> SamplingParams:
    def maybe(value: float, neutral: float) -> float:
        return value if random.random() < 0.3 else neutral

    return replace(
        plain,
        min_tokens=random.choice((0, 0, 2, 6)),
        top_p=maybe(0.8, 1.0),
        top_k=random.choice((0, 0, 5, 40)),
        min_p=maybe(0.02, 0.0),
        stop_token_ids=frozenset(_ids(random, model, random.choice((0, 40)))),
        logit_bias={i: random.uniform(-4, 6) for i in _ids(random, model, random.choice((0, 0, 8)))},
        presence_penalty=maybe(0.5, 0.0),
        frequency_penalty=maybe(-0.4, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        allowed_token_ids=frozenset(_ids(random, model, random.choice((0, 0, 0, 60)))),
        bad_words=tuple(tuple(_ids(random, model, 2)) for _ in range(random.choice((0, 0, 3)))),
        processed_logprobs=random.random() < 0.3,
        sampling_mask=random.random() < 0.2,
    )


def _ids(random: Random, model: StressModel, count: int) -> list[int]:
    return [random.randrange(3, model.config.vocab_size) for _ in range(count)]
