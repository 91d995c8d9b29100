"""Chat messages as clients send them. `router.text.chat_messages` brings them into the form that a template reads."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from router.request_schemas import ListOf, RequestModel


class TextPart(RequestModel):
    """Text in a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(RequestModel):
    """An assistant's refusal, which is text too."""

    type: Literal["refusal"]
    refusal: str


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

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ListOf[Annotated[TextPart | RefusalPart, Field(discriminator="type")]] | None = Field(
        None, description="Only an assistant that called tools may have none."
    )
    tool_calls: ListOf[ToolCall] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)
        return self.content or ""

    def as_sent(self) -> dict[str, object]:
        return self.model_dump(exclude_unset=True)
