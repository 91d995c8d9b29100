"""Messages of a chat request, brought into the form that a template reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from common.errors import InvalidRequestError

#: A message as it came, and as a template gets it.
Message = Mapping[str, object]

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
#: Types of parts that hold text under the key `text`.
TextKind = Literal["text", "input_text", "output_text"]

_ROLES: tuple[Role, ...] = get_args(Role)
_PARAM = "messages"
#: Part types that are text, with the key that holds it.
_TEXT_PARTS = {**dict.fromkeys(get_args(TextKind), "text"), "refusal": "refusal"}
#: What an assistant may say without content.
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal")
#: Names that clients and templates use for an assistant's reasoning, the common one first.
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms of `content` that a template prints rightly: a string, a list of text parts."""

    string: bool = True
    parts: bool = False


def template_messages(messages: Sequence[Message], forms: ContentForms) -> list[dict[str, object]]:
    """Copies of the messages with nulls left out, content in a form the template reads, and tool arguments parsed.

    Text parts stay parts if the template reads them, else they are joined by newlines, as vLLM does. The null content
    of an assistant's tool calls becomes "".

    Raises:
        InvalidRequestError: `param` is "messages"; the message names the place.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param=_PARAM)
    return [_template_message(message, f"messages[{index}]", forms) for index, message in enumerate(messages)]


def _template_message(message: Message, place: str, forms: ContentForms) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise _wrong(place, f"must be an object, got {message!r:.100}")
    given = {key: value for key, value in message.items() if value is not None}
    if given.get("role") not in _ROLES:
        raise _wrong(f"{place}.role", f"must be one of {', '.join(_ROLES)}, got {given.get('role')!r:.100}")
    given["content"] = _content(given, place, forms)
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(given["tool_calls"], f"{place}.tool_calls")
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    if reasoning is not None:
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    return given


def _content(message: Message, place: str, forms: ContentForms) -> object:
    match message.get("content"):
        case None if message["role"] == "assistant" and any(message.get(name) for name in _INSTEAD_OF_CONTENT):
            return "" if forms.string else []
        case None:
            raise _wrong(f"{place}.content", "is missing; only an assistant message with tool_calls may leave it out")
        case str(text):
            return text if forms.string else _text_parts([text])
        case list(parts):
            texts = [_part_text(part, f"{place}.content[{index}]") for index, part in enumerate(parts)]
            return _text_parts(texts) if forms.parts else "\n".join(texts)
        case other:
            raise _wrong(f"{place}.content", f"must be a string or a list of parts, got {other!r:.100}")


def _text_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: object, place: str) -> str:
    match part:
        case {"type": str(kind), **rest} if kind in _TEXT_PARTS:
            match rest.get(_TEXT_PARTS[kind]):
                case str(text):
                    return text
                case other:
                    raise _wrong(f"{place}.{_TEXT_PARTS[kind]}", f"must be a string, got {other!r:.100}")
        case {"type": str(kind)}:
            raise _wrong(f"{place}.type", f"is {kind!r:.100}, which is not supported; this server takes text only")
        case other:
            raise _wrong(place, f'must be a part like {{"type": "text", "text": "..."}}, got {other!r:.100}')


def _tool_calls(calls: object, place: str) -> list[dict[str, object]]:
    """Tool calls with `arguments` as an object: clients send its JSON, templates print it anew."""
    if not isinstance(calls, list):
        raise _wrong(place, f"must be a list, got {calls!r:.100}")
    return [_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, place: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(place, f'must be like {{"type": "function", "function": {{"name": ...}}}}, got {call!r:.100}')
    arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, place: str) -> object:
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise _wrong(place, f"is not JSON: {error}") from error


def _wrong(place: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} {reason}", param=_PARAM)
