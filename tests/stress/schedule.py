"""One random round: engines of random shapes, random requests in a random order, and random accidents."""

from dataclasses import dataclass
from random import Random

from common.engine.request import EngineRequest, RequestId, Work
from tests.stress.asks import Ask, draw_asks
from tests.stress.model import EngineShape, ModelRig, StressModel
from tests.stress.oracle import Oracle
from tests.stress.pair import MAX_IDLE, EnginePair
from tests.stress.tally import Tally

#: No step is that short: while short prompts come, a step has as few tokens as it may, on whatever machine.
NO_TIME_S = 1e-9

#: Requests per ask: a solo run serves several of them.
REQUESTS_PER_ASK = 3


@dataclass(frozen=True)
class Rates:
    """How often, per tick, something happens; drawn anew for every round."""

    arrival: float
    prefill_step: float
    decode_step: float
    carry: float
    accident: float


class Round:
    """Plays one round; the same seed, model and number of requests give the same round."""

    def __init__(self, model: StressModel, seed: str, num_requests: int) -> None:
        self._random = random = Random(seed)
        self._bounds = Random(f"bounds/{seed}")
        is_long = random.random() < 0.12
        self._asks = draw_asks(random, model, max(3, num_requests // REQUESTS_PER_ASK), long=is_long)
        self._left = num_requests // 2 if is_long else num_requests
        self._block_size = random.choice((1, 4, 4, 16))
        self._is_long = is_long
        self._model = model
        self.pair = EnginePair(model, self._shape(), self._shape(), self._block_size)
        self._rates = Rates(
            arrival=random.choice((0.2, 0.5, 1.0)),
            prefill_step=random.choice((0.3, 0.7, 1.0)),
            decode_step=random.choice((0.5, 0.9, 1.0)),
            carry=random.choice((0.2, 0.6, 1.0)),
            accident=random.choice((0.0, 0.03, 0.08)),
        )
        self._count = 0

    def _shape(self) -> EngineShape:
        """Pools that the largest request just fits, or two or three of them: others have to give way."""
        random = self._random
        largest = max(-(-ask.num_slots // self._block_size) for ask in self._asks)
        swap_positions = random.choice((0, 60, 10**6))
        return EngineShape(
            num_blocks=int(largest * random.choice((1.0, 1.2, 1.5, 2.0, 3.0, 6.0))),
            budget=random.randint(24, 128) if self._is_long else random.choice((1, 4, 6, 8, 16, 17, 33, 64, 64)),
            seats=random.choice((1, 3, 4, 5, 6, 8, 10)),
            swap_space_bytes=swap_positions * self._model.position_bytes(),
            prefix_caching=random.random() < 0.85,
            max_contended_step_s=self._bounds.choice((None, NO_TIME_S)),
        )

    def play(self, oracle: Oracle) -> Tally:
        """Until every request has ended.

        Raises:
            AssertionError: something was inconsistent, stuck, held at the end, or not the bytes of a solo run.
        """
        num_idle = 0
        while self._left or self.pair.live() or self.pair.is_updating:
            num_idle = 0 if self._tick(forced=num_idle > 0) else num_idle + 1
            assert num_idle < MAX_IDLE, f"stuck: {self.pair}"
        self.pair.check_everything(oracle)
        self.pair.tally.rounds = 1
        return self.pair.tally

    def _tick(self, *, forced: bool) -> bool:
        """Whatever chance has happen, or everything that can; whether anything moved."""
        random, rates, pair = self._random, self._rates, self.pair
        moved = False
        if self._left and (forced or random.random() < rates.arrival):
            self._submit()
            moved = True
        if random.random() < rates.accident:
            self._accident()
        if forced or random.random() < rates.prefill_step:
            moved |= pair.step(pair.prefill)
        if forced or random.random() < rates.decode_step:
            moved |= pair.step(pair.decode)
        for name in list(pair.handoffs):
            if name in pair.handoffs and (forced or random.random() < rates.carry):
                moved |= pair.carry(name, random.choice((1, 3, 16, 1000)))
        return pair.try_update() or moved

    def _submit(self) -> None:
        random, pair = self._random, self.pair
        self._left -= 1
        self._count += 1
        ask: Ask = random.choice(self._asks)
        work = random.choice((Work.WHOLE, Work.DECODE))
        request = EngineRequest(
            RequestId(f"r{self._count}"),
            ask.prompt,
            ask.sampling,
            random.choice((None, 0, 0, random.randint(0, len(ask.prompt)))),
            work,
            priority=random.choice((0, 0, 0, -1, 2)),
            matcher=ask.matcher,
            cache_salt=random.choice(("",) * 7 + ("salt",)),
            local_prefill_max_tokens=random.choice((0, 0, 0, 4, 60)),
        )
        rig = pair.prefill if work is Work.WHOLE and random.random() < 0.25 else pair.decode
        pair.submit(request, ask, rig)

    def _accident(self) -> None:
        random, pair = self._random, self.pair
        kind = random.choice(("cancel", "abort", "abort one", "forget", "update"))
        live = pair.live()
        if kind == "update":
            if not pair.is_updating:
                pair.begin_update()
        elif kind == "forget":
            pair.forget_prefixes(self._either())
        elif live:
            victim = random.choice(live)
            if kind == "cancel":
                pair.cancel(victim)
            else:
                pair.abort(victim, random.randrange(victim.request.sampling.n) if kind == "abort one" else None)

    def _either(self) -> ModelRig:
        return self._random.choice((self.pair.prefill, self.pair.decode))
