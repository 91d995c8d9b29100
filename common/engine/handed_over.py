"""What is wrong with a handoff, as the engine that receives it sees it. Pure functions."""

from collections.abc import Sequence

from common.engine.group import ChoiceGroup
from common.engine.sequence import SequenceState
from common.errors import InternalError
from common.sampling import SampledToken


def problem_of(prompt: SequenceState, first_tokens: Sequence[SampledToken], vocab_size: int) -> str | None:
    """Why the first tokens cannot follow this prompt; None if they can.

    Raises:
        InvalidRequestError: the parser of the request's grammar hit one of its limits.
    """
    num_choices = prompt.request.sampling.n
    if len(first_tokens) != num_choices:
        return f"{len(first_tokens)} first tokens came for {num_choices} choices"
    strange = [token.token_id for token in first_tokens if not 0 <= token.token_id < vocab_size]
    if strange:
        return f"the first token {strange[0]} is no vocabulary id"
    if refused := _refused_by_grammar(prompt, first_tokens):
        return f"the grammar refuses the first token {refused[0]}"
    if prompt.num_shared and is_of_other_weights(prompt, first_tokens):
        return (
            f"a prompt whose beginning was cached from weights {prompt.chain.scope.weight_version!r} "
            f"was continued with weights {first_tokens[0].weight_version!r}"
        )
    return None


def _refused_by_grammar(prompt: SequenceState, first_tokens: Sequence[SampledToken]) -> list[int]:
    matcher = prompt.request.matcher
    if matcher is None:
        return []
    allowed_V = matcher.fork().allowed()
    return [token.token_id for token in first_tokens if not allowed_V[token.token_id]]


def is_of_other_weights(prompt: SequenceState, first_tokens: Sequence[SampledToken]) -> bool:
    """Whoever computed the prompt had not the weights that were in use here when its blocks were given."""
    return any(token.weight_version != prompt.chain.scope.weight_version for token in first_tokens)


def misplaced(group: ChoiceGroup, what: str) -> InternalError:
    """`what` came for a request that does not wait for it."""
    prompt = group.sequences.get(0)
    if prompt is None:
        return InternalError(f"{what} came for a request that is decoding")
    return InternalError(
        f"{what} came for a sequence that is {prompt.phase.value} "
        f"with {prompt.num_computed} of {prompt.num_prompt} prompt tokens"
    )
