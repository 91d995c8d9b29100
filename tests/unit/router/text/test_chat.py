"""Chat templates, compared with transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pytest

from common.errors import ConfigError, InvalidRequestError
from router.text.chat import ChatTemplate, load_chat_template
from tests.unit.router.text import checkpoints, templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS: list[dict[str, object]] = [
    {"role": "user", "content": " 1 < 2 & 'é'? "},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
]
SYSTEM: list[dict[str, object]] = [{"role": "system", "content": "be brief"}, *TURNS]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "x": "<b>é"}}}]
CALLS: list[dict[str, object]] = [
    {"role": "user", "content": "1+2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}},
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "3"},
    {"role": "assistant", "content": "3", "reasoning_content": "\nhm\n"},
    {"role": "user", "content": "ok"},
]


def template(source: str, **options: object) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Reference:
    folder = tmp_path_factory.mktemp("reference")
    checkpoints.write(folder, checkpoints.sentencepiece(), {})
    return checkpoints.transformers_tokenizer(folder, **SPECIAL)


@pytest.mark.parametrize(
    ("source", "messages", "tools"),
    [
        (templates.CHATML, TURNS, None),
        (templates.CHATML, SYSTEM, None),
        (templates.CHATML, SYSTEM, TOOLS),
        (templates.CHATML, CALLS, TOOLS),
        (templates.LLAMA3, SYSTEM, None),
        (templates.MISTRAL, TURNS, None),
        (templates.PARTS_OR_STRING, TURNS, None),
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers(
    reference: checkpoints.Reference,
    source: str,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    add_generation_prompt: bool,
) -> None:
    expected = reference.apply_chat_template(
        messages, tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    found = template(source).render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    assert found == expected


@pytest.mark.parametrize("source", [templates.CHATML, templates.LLAMA3, templates.MISTRAL])
@pytest.mark.parametrize("final", ["It is", "It is  ", "  It is\n"])
def test_continues_the_final_message_as_transformers(reference: checkpoints.Reference, source: str, final: str) -> None:
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": final}]
    expected = reference.apply_chat_template(
        messages, chat_template=source, continue_final_message=True, tokenize=False
    )
    found = template(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert found == expected
    assert messages[-1]["content"] == final


def test_variables_reach_the_template(reference: checkpoints.Reference) -> None:
    expected = reference.apply_chat_template(
        TURNS, chat_template=templates.CHATML, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    found = template(templates.CHATML).render(TURNS, variables={"enable_thinking": False})
    assert found == expected
    assert found.endswith("</think>\n\n")


def test_ranges_are_sequences(reference: checkpoints.Reference) -> None:
    source = (
        "{% for i in range(1, 9, 3) %}{{ i }}/{{ loop.length }} {% endfor %}{{ range(5)[1:] | list }}{{ range(4)[-1] }}"
    )
    assert template(source).render(TURNS) == reference.apply_chat_template(TURNS, chat_template=source, tokenize=False)


def test_the_date_is_that_of_the_clock() -> None:
    dated = template(templates.LLAMA3, now=lambda: datetime(2031, 2, 3))
    assert "Today Date: 03 Feb 2031" in dated.render(TURNS, variables={"dated": True})


def test_arguments_arrive_as_json_text_and_are_printed_anew() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1,  "b":"<é>"}'}}
    messages = [CALLS[0], {**CALLS[1], "tool_calls": [call]}, *CALLS[2:]]
    chatml = template(templates.CHATML)
    assert chatml.render(messages, tools=TOOLS) == chatml.render(CALLS, tools=TOOLS)


def test_text_parts_are_joined_for_a_template_that_reads_strings() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = template(templates.CHATML).render([{"role": "user", "content": parts}])
    assert found == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (templates.PARTS_OR_STRING, "a", "user: a\n"),
        (templates.PARTS_OR_STRING, ["a", "b"], "user: [a][b]\n"),
        (templates.PARTS_ONLY, "a", "[a]"),
        (templates.PARTS_ONLY, ["a", "b"], "[a][b]"),
        ("{{ messages[0].content }}", ["a", "b"], "a\nb"),
        ("{{ messages[0].content | tojson }}", ["a", "b"], '"a\\nb"'),
    ],
)
def test_content_takes_the_form_that_the_template_reads(source: str, content: str | list[str], expected: str) -> None:
    given = content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]
    assert template(source).render([{"role": "user", "content": given}]) == expected


def test_the_last_part_is_continued() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = template(templates.PARTS_OR_STRING).render(
        [{"role": "assistant", "content": parts}], add_generation_prompt=False, continue_final_message=True
    )
    assert found == "assistant: [a][b"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages must not be empty"),
        (["hi"], "messages[0] must be an object"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content is missing"),
        ([{"role": "assistant", "content": None}], "messages[0].content is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content must be a string"),
        ([{"role": "user", "content": {"a": 1}}], "messages[0].content must be a string"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'"),
        ([TURNS[0], {"role": "robot", "content": "x"}], "messages[1].role must be one of"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "assistant", "content": "x", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments is not JSON",
        ),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_wrong_messages_are_named(messages: Sequence[Mapping[str, object]], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(templates.CHATML).render(messages)
    assert named in caught.value.message
    assert caught.value.param == "messages"


def test_the_template_refuses_in_its_own_words() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(templates.MISTRAL).render([{"role": "assistant", "content": "x"}])
    assert caught.value.message == "Conversation roles must alternate user/assistant/user/assistant/..."
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ missing.attribute }}",
        "{{ messages[0].content | tojson(indent='a', separators=1) }}",
        "{{ '%d' % 'x' }}",
        "{% include 'other' %}",
    ],
)
def test_any_failure_inside_the_template_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render(TURNS)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for m in messages * 1000 %}{{ m.content }}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**(10**10) }}",
        "{{ (messages * 1000) * 1000000 }}",
        "{% for a in range(10**8) %}{% endfor %}",
    ],
)
def test_a_template_that_runs_wild_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(source, time_limit_s=0.05, max_chars=2**20).render(TURNS)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
def test_fields_of_the_request_are_no_variables(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(templates.CHATML).render(TURNS, variables={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_turn_cannot_be_both_continued_and_begun() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(templates.CHATML).render(TURNS, add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequestError, match="does not show"):
        template("nothing").render(TURNS, add_generation_prompt=False, continue_final_message=True)


def test_a_template_for_tools_is_used_with_tools_only() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert chat.render(TURNS) == chat.render(TURNS, tools=[]) == "plain"
    assert chat.render(TURNS, tools=TOOLS) == "tools"


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def rendered(file: Path | None = None) -> str | None:
        found = load_chat_template(tmp_path, file, SPECIAL)
        return None if found is None else found.render(TURNS)

    assert rendered() is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered() == "json"
    settings = {"chat_template": [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "t"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert rendered() == "list"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}é", encoding="utf-8")
    assert rendered() == "</s>é"
    (tmp_path / "own.jinja").write_text("own")
    assert rendered(tmp_path / "own.jinja") == "own"
    assert load_chat_template(None, None, {}) is None


@pytest.mark.parametrize(
    "value",
    [
        "{% if %}",
        "{% for x in y %}",
        "{{ x | nonexistent }}",
        5,
        [{"name": "default"}],
        [{"name": "x", "template": ""}],
    ],
)
def test_a_broken_template_keeps_the_server_from_starting(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path, None, {})


def test_a_missing_template_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        load_chat_template(None, tmp_path / "nowhere.jinja", {})
