"""Time to first token and decode rate, through HTTP, of servers that are all up."""

from collections.abc import Sequence

from benchmarks.load import LoadGenerator
from benchmarks.stages.conditions import Condition, Servers
from benchmarks.stages.stage import balanced
from benchmarks.table import Quantity, Samples

PROMPTS = (512, 2048)
CONCURRENCIES = (1, 4, 16)


def ttft(num_tokens: int) -> Quantity:
    return Quantity(f"TTFT {num_tokens}", "ms", higher_is_better=False)


def decode(concurrency: int) -> Quantity:
    return Quantity(f"decode C={concurrency}", "tok/s", higher_is_better=True)


class ServingStage:
    """Under each condition, one value of every time and rate.

    Args:
        name: of the stage.
    """

    def __init__(self, name: str, servers: Servers, conditions: Sequence[Condition], num_rounds: int) -> None:
        self.name = name
        self.num_rounds = num_rounds
        self._servers = servers
        self._conditions = conditions

    async def measure(self, number: int) -> Samples:
        """See `Stage`."""
        loads = {each.name: await self._servers.load(each) for each in self._conditions}
        samples = Samples()
        order = balanced(list(loads.items()), number)
        for num_tokens in PROMPTS:
            for condition, load in order:
                samples.add(condition, ttft(num_tokens), 1e3 * await load.time_to_first_token(num_tokens))
        for concurrency in CONCURRENCIES:
            for condition, load in order:
                samples.add(condition, decode(concurrency), await load.decode_rate(concurrency))
        return samples


async def exercise(load: LoadGenerator) -> None:
    """Everything that the stage sends, once: afterwards the server holds what it needs for such a load."""
    for num_tokens in PROMPTS:
        await load.time_to_first_token(num_tokens)
    await load.decode_rate(max(CONCURRENCIES))
