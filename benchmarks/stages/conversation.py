"""Many turns of a conversation: what rows of positions that the client already knows cost, and leaving them out."""

import time
from dataclasses import dataclass, field

from benchmarks.load import LoadGenerator
from benchmarks.stages.conditions import Condition, Servers
from benchmarks.stages.stage import balanced
from benchmarks.table import Quantity, Samples
from deploy.client import ClusterClient, decode_rows

#: New tokens of the prompt per turn, and of the answer.
TURN_PROMPT_TOKENS = 16
TURN_OUTPUT_TOKENS = 16

ROWS_OFF, NEW_ROWS, ALL_ROWS = "no rows", "rows of the new positions", "rows of all positions"


@dataclass(slots=True)
class Conversation:
    """One condition's dialogue. Its tokens are its own, so that no other's prefix is found for it."""

    name: str
    client: ClusterClient
    load: LoadGenerator
    tokens: list[int] = field(default_factory=list)
    #: Positions whose rows have come.
    num_known: int = 0
    seconds: float = 0.0

    async def turn(self) -> None:
        """Raises RuntimeError if the answer is not as long as it should be."""
        self.tokens += self.load.token_ids(TURN_PROMPT_TOKENS)
        start = self.num_known if self.name == NEW_ROWS else 0
        sampling = {
            "max_tokens": TURN_OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_routed_experts": self.name != ROWS_OFF,
            "routed_experts_prompt_start": start,
        }
        sent = time.perf_counter()
        body = {"token_ids": self.tokens, "sampling_params": sampling}
        choices = [choice async for event in self.client.stream(body) for choice in event["choices"]]
        self.seconds += time.perf_counter() - sent
        self.tokens += [token for choice in choices for token in choice["token_ids"] or ()]
        rows = [decode_rows(choice["routed_experts"]) for choice in choices if choice["routed_experts"]]
        num_rows = sum(len(array) for array in rows)
        expected = 0 if self.name == ROWS_OFF else len(self.tokens) - 1 - start
        if num_rows != expected:
            raise RuntimeError(f"{num_rows} rows came, not {expected}")
        self.num_known = len(self.tokens) - 1


class ConversationStage:
    """Three conversations of one server, turn by turn in turns."""

    name = "conversation"

    def __init__(self, servers: Servers, condition: Condition, num_rounds: int, num_turns: int) -> None:
        self.num_rounds = num_rounds
        self.quantity = Quantity(f"{num_turns} turns", "s", higher_is_better=False)
        self._servers = servers
        self._condition = condition
        self._num_turns = num_turns

    async def measure(self, number: int) -> Samples:
        """See `Stage`."""
        load = await self._servers.load(self._condition)
        client = await self._servers.client(self._condition.server)
        conversations = [Conversation(name, client, load) for name in (ROWS_OFF, NEW_ROWS, ALL_ROWS)]
        for turn in range(self._num_turns):
            for conversation in balanced(conversations, number + turn):
                await conversation.turn()
        samples = Samples()
        for conversation in conversations:
            samples.add(conversation.name, self.quantity, conversation.seconds)
        return samples
