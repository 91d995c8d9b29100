"""Chat templates: the messages of a request as the one prompt that the model was trained on."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Template, TemplateError, TemplateSyntaxError

from common.errors import ConfigError, InvalidRequestError
from router.text.chat_messages import ContentForms, Message, template_messages
from router.text.sandbox import DEADLINE, ChatSandbox, TemplateTimeoutError
from router.text.tokenizer import check_unicode, read_json_object

_PARAM = "messages"
#: Variables that the request has fields of its own for, or that are the server's.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
#: What sandboxed code can raise on messages that it does not expect, beside jinja's own errors.
_TEMPLATE_ERRORS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
#: Rendering a long conversation takes milliseconds.
_TIME_LIMIT_S = 5.0
#: Far more than any context holds.
_MAX_CHARS = 64 * 2**20
#: Put behind the message to continue, to find its end in the prompt; its own end shows whether the template trims.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PROBE = "moerelay-probe"
#: A list of parts as Python and as JSON print it.
_PRINTED_PARTS = (f"'text': '{_PROBE}'", f'"text": "{_PROBE}"')


class ChatTemplate:
    """The templates of a checkpoint. Immutable: threads may render at once."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        origin: str = "chat template",
        now: Callable[[], datetime] = datetime.now,
        time_limit_s: float = _TIME_LIMIT_S,
        max_chars: int = _MAX_CHARS,
    ) -> None:
        """Args:
        sources: templates by name: "default", and perhaps "tool_use" for requests with tools.
        special_tokens: by role, e.g. {"bos_token": "<s>"}; templates see them under these names.
        origin: where the sources are from, for messages.
        now: the clock of `strftime_now`.

        Raises:
            ConfigError: a template is no jinja, or there is no default.
        """
        self._special_tokens = dict(special_tokens)
        self._time_limit_s = time_limit_s
        self._max_chars = max_chars
        if "default" not in sources:
            raise ConfigError(f"{origin}: no template is named default", param="chat_template")
        sandbox = ChatSandbox(now)
        self._templates = {name: _compile(sandbox, source, origin) for name, source in sources.items()}
        self._forms = {name: self._probe(template) for name, template in self._templates.items()}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt. It holds the special tokens already: encode it without adding more.

        Args:
            messages: as the API has them.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: end inside the last message instead, so that the model goes on with it.
            variables: `chat_template_kwargs`.

        Raises:
            InvalidRequestError: the messages are wrong, or the template refuses them, with its own words.
        """
        _check_end(add_generation_prompt, continue_final_message)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        prepared = template_messages(messages, self._forms[name])
        final = _tag_final(prepared[-1]) if continue_final_message else None
        given = {"tools": tools or None, "documents": documents, "add_generation_prompt": add_generation_prompt}
        settings = {**self._special_tokens, **_checked_variables(variables or {}), "messages": prepared, **given}
        prompt = self._run(self._templates[name], settings)
        if final is not None:
            prompt = _cut_at_tag(prompt, final)
        check_unicode(prompt, param=_PARAM)
        return prompt

    def _run(self, template: Template, settings: Mapping[str, object]) -> str:
        token = DEADLINE.set(time.monotonic() + self._time_limit_s)
        try:
            return self._collect(template, settings)
        except TemplateTimeoutError as error:
            raise InvalidRequestError(f"{error} (more than {self._time_limit_s:g} s)", param=_PARAM) from error
        except TemplateError as error:
            raise InvalidRequestError(str(error) or "the chat template refuses these messages", param=_PARAM) from error
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequestError(f"the chat template cannot read these messages: {error}", param=_PARAM) from error
        finally:
            DEADLINE.reset(token)

    def _collect(self, template: Template, settings: Mapping[str, object]) -> str:
        pieces: list[str] = []
        room = self._max_chars
        for piece in template.generate(settings):
            room -= len(piece)
            if room < 0:
                raise TemplateError(f"the chat template makes a prompt of more than {self._max_chars} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _probe(self, template: Template) -> ContentForms:
        """Tries both forms of content: a template that loops over parts prints the text of one and not its braces."""
        parts = self._prints(template, [{"type": "text", "text": _PROBE}])
        return ContentForms(string=self._prints(template, _PROBE) or not parts, parts=parts)

    def _prints(self, template: Template, content: object) -> bool:
        settings = {**self._special_tokens, "messages": [{"role": "user", "content": content}], "tools": None}
        try:
            prompt = self._run(template, {**settings, "documents": None, "add_generation_prompt": True})
        except InvalidRequestError:
            return False
        return _PROBE in prompt and not any(printed in prompt for printed in _PRINTED_PARTS)


def load_chat_template(
    folder: Path | None, file: Path | None, special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template in `file`, else the checkpoint's: chat_template.jinja, tokenizer_config.json, chat_template.json.

    Raises:
        ConfigError: a file that cannot be read, or holds no template.
    """
    if file is not None:
        origin = f"--chat-template {file}"
        return ChatTemplate({"default": _read_text(file, origin)}, special_tokens, origin=origin)
    if folder is None:
        return None
    if (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
        return ChatTemplate({"default": _read_text(path, str(path))}, special_tokens, origin=str(path))
    for path in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        value = read_json_object(path).get("chat_template") if path.is_file() else None
        if value is not None:
            return ChatTemplate(_named_templates(value, path), special_tokens, origin=str(path))
    return None


def _named_templates(value: object, path: Path) -> dict[str, str]:
    """One template, or a list of {"name", "template"}."""
    match value:
        case str(source):
            return {"default": source}
        case list(entries):
            named: dict[str, str] = {}
            for entry in entries:
                match entry:
                    case {"name": str(name), "template": str(source)}:
                        named[name] = source
                    case _:
                        raise ConfigError(f"{path}: a chat template has no name or no text", param="chat_template")
            return named
        case _:
            raise ConfigError(f"{path}: chat_template is neither text nor a list", param="chat_template")


def _read_text(path: Path, origin: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin} cannot be read: {error}", param="chat_template") from error


def _compile(sandbox: ChatSandbox, source: str, origin: str) -> Template:
    try:
        return sandbox.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{origin}, line {error.lineno}: {error.message}", param="chat_template") from error
    except (TemplateError, RecursionError) as error:
        raise ConfigError(f"{origin}: {error}", param="chat_template") from error


def _check_end(add_generation_prompt: bool, continue_final_message: bool) -> None:
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude one another; set one to false",
            param="continue_final_message",
        )


def _checked_variables(variables: Mapping[str, object]) -> Mapping[str, object]:
    for name in variables:
        if name in _RESERVED:
            raise InvalidRequestError(
                f"chat_template_kwargs.{name} is not allowed; the request has a field for it, or the server sets it",
                param="chat_template_kwargs",
            )
    return variables


def _tag_final(message: dict[str, object]) -> str:
    """Marks the end of the message to continue; returns its text."""
    match message["content"]:
        case str(text):
            message["content"] = text + _TAG
            return text
        case [*parts, {"type": "text", "text": str(text)}]:
            message["content"] = [*parts, {"type": "text", "text": text + _TAG}]
            return text
        case _:
            raise InvalidRequestError(
                "continue_final_message is set, but the last message has no text to continue", param=_PARAM
            )


def _cut_at_tag(prompt: str, final: str) -> str:
    """The prompt up to the end of `final`; the rule is transformers'."""
    at = prompt.rfind(_TAG.strip())
    if at < 0 or final.strip() not in prompt:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template does not show the last message", param=_PARAM
        )
    # A template that trims would have trimmed the end of the message too.
    return prompt[:at] if prompt.startswith(_TAG, at) else prompt[:at].rstrip()
