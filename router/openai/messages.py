"""Chat messages as clients send them. `router.text.chat_messages` brings them into the form that a template reads."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from router.request_schemas import ListOf, RequestModel
from router.text.chat_messages import Role, TextKind


class TextPart(RequestModel):
    """Text in a message's content."""

    type: TextKind
    text: str


class RefusalPart(RequestModel):
    """An assistant's refusal, which is text too."""

    type: Literal["refusal"]
    refusal: str


def _kind_of_content(value: object) -> str | None:
    """So that an error is about one form, and a part that is no text is named."""
    match value:
        case str():
            return "text"
        case list():
            return "parts"
        case _:
            return None


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[ListOf[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], Tag("parts")],
    Discriminator(
        _kind_of_content,
        custom_error_type="content_type",
        custom_error_message="send a text, or a list of parts",
    ),
]


class CalledFunction(RequestModel):
    """What an assistant called."""

    name: str
    arguments: str | dict[str, Any] | None = Field(None, description="A JSON object, usually as text.")


class ToolCall(RequestModel):
    """One call that an earlier answer made. Other fields reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    function: CalledFunction


class Message(RequestModel):
    """One turn. Fields not named here reach the chat template as they are."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}]}
    )

    role: Role
    content: Content | None = Field(None, description="Only an assistant that called tools may have none.")
    tool_calls: ListOf[ToolCall] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)
        return self.content or ""

    def as_sent(self) -> dict[str, object]:
        return self.model_dump(exclude_unset=True)
