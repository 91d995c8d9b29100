"""What the OpenAPI document says about one route. Modules with handlers list theirs as `OPERATIONS`."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from pydantic import BaseModel

#: Statuses that every request which reads a body may end with, beside what its handler does.
BODY_ERRORS = (400, 408, 413)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: method in lower case, path as aiohttp has it.

    tag: heading in the docs page.
    answer: JSON of a 200, or None if no model describes it (then `media_type` says what it is).
    body: JSON that is sent. A body whose fields are all optional may be left out if `body_required` is False.
    events: what one event of the streaming answer holds, if there is one.
    errors: statuses that the handler itself ends with; those of every route (400, 401, 408, 413, 500) are added.
    refusal: what a 400 of the handler itself holds, where another system's clients expect it; else an ErrorResponse.
    query: query parameters, one per field.
    examples: bodies that any model serves, the simplest first.
    """

    method: str
    path: str
    summary: str
    tag: str = "server"
    _: KW_ONLY
    answer: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    refusal: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    media_type: str = "application/json"
    body_required: bool = True
    examples: tuple[Mapping[str, object], ...] = ()

    @property
    def id(self) -> str:
        """`post_v1_chat_completions`: unique, and as stable as the path."""
        words = self.path.replace(".", "_").replace("{", "").replace("}", "").strip("/").split("/")
        return "_".join([self.method, *words])
