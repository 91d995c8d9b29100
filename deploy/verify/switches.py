"""What a cluster was started with, as far as it changes answers. Found out with one request."""

from dataclasses import dataclass

from common.errors import InternalError
from deploy.client import ClusterClient


@dataclass(frozen=True, slots=True)
class Switches:
    """As the answers tell."""

    #: Answers have rows. If not, every answer must be without.
    routing: bool = True
    #: Logprobs are those of the distribution sampled from.
    processed_logprobs: bool = False


async def find_switches(client: ClusterClient) -> Switches:
    """Asks for the only token that is allowed: sampled from that distribution, it is certain. Raises MoerelayError."""
    sampling = {"max_tokens": 1, "temperature": 0, "allowed_token_ids": [0], "logprobs": 0}
    response = await client.generate({"token_ids": [0], "sampling_params": sampling})
    try:
        [choice] = response["choices"]
        [token] = choice["logprobs"]["content"]
        return Switches(choice["routed_experts"] is not None, token["logprob"] == 0)
    except (KeyError, TypeError, ValueError) as error:
        raise InternalError(f"the answer has not the documented form: {error!r}") from error
