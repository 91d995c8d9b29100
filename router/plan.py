"""What a validated request is made of: plain records between the dialects, the planner and the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.pb import types_pb2
from common.routing.record import RoutingLayout
from common.sampling import SamplingParams
from router.request_schemas import SamplingFields
from router.text.stop import StopStrings


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against: the model that the fleet serves."""

    vocab_size: int
    max_model_len: int
    layout: RoutingLayout
    weight_version: str
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, model: types_pb2.ModelDescription) -> "ModelLimits":
        layout = RoutingLayout(model.num_layers, model.top_k, model.num_experts)
        return cls(model.vocab_size, model.max_model_len, layout, model.weight_version, frozenset(model.eos_token_ids))


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request of any dialect asks for, in vLLM's terms; not yet checked against model and settings."""

    #: Token ids, one sequence per prompt.
    prompts: Sequence[Sequence[int]]
    sampling: SamplingFields
    #: The field that holds the prompts, for error messages.
    prompt_param: str = "token_ids"
    priority: int = 0
    #: Only requests with the same one share cached prefixes.
    cache_salt: str = ""
    #: The answer shows text.
    wants_text: bool = False
    #: llguidance's form of what `structured_outputs`, or another field of the dialect, asks for.
    grammar: str | None = None
    #: The answer shows the prompts only; `sampling.max_tokens` is ignored.
    prompt_only: bool = False


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What becomes of the tokens' text. Without `shown` and without stop strings nothing is detokenized."""

    shown: bool = False
    #: Prepared once for all prompts and choices of a request.
    stops: StopStrings = field(default_factory=StopStrings)
    skip_special_tokens: bool = True

    @property
    def needed(self) -> bool:
        return self.shown or bool(self.stops.texts)


@dataclass(frozen=True, slots=True)
class Plan:
    """One prompt and its `sampling.n` choices, ready to run. `routing_start` is None when no rows are wanted."""

    #: Position of the prompt in the request.
    index: int
    #: Unique on every worker.
    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    routing_start: int | None
    text: TextOptions = TextOptions()
    priority: int = 0
    prompt_only: bool = False
    cache_salt: str = ""

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)

    def choice_index(self, choice: int) -> int:
        """Index of a choice among all choices of the request."""
        return self.index * self.sampling.n + choice
