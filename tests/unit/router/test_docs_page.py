"""The docs page: whole, self-contained, with commands that work."""

import json
import re
import shlex
from html.parser import HTMLParser

from router.docs_page import example, render
from router.openapi import document
from router.operation import Operation
from router.response_schemas import ErrorResponse
from router.surface import CONTROL, PUBLIC
from tests.unit.router.cluster import running


class Page(HTMLParser):
    """What a browser would see: ids, links, and whatever it would fetch."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a":
            self.links.append(values["href"])
        elif "href" in values or "src" in values:
            self.fetched.append(values.get("href") or values["src"])


async def test_it_is_served_and_needs_nothing_else() -> None:
    async with running() as cluster, cluster.http.get("/docs") as response:
        html = await response.text()
        assert (response.status, response.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    page = Page(html)
    assert page.fetched == ["data:,"]
    assert "script" not in page.tags
    assert "url(" not in html
    assert "@import" not in html
    described = document(PUBLIC.title, PUBLIC.operations)
    wanted = [each["operationId"] for item in described["paths"].values() for each in item.values()]
    assert set(wanted) | set(described["components"]["schemas"]) == set(page.ids)
    assert {link.removeprefix("#") for link in page.links} - {"openapi.json"} <= set(page.ids)


def test_text_is_escaped() -> None:
    operation = Operation("get", "/x", "<script>alert(1)</script> & more", answer=ErrorResponse)
    html = render(document("t", [operation]))
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html


def test_the_control_page_renders() -> None:
    assert "moerelay control" in render(document(CONTROL.title, CONTROL.operations))


async def test_the_commands_work() -> None:
    """The generate command's body is a request that is served."""
    described = document(PUBLIC.title, PUBLIC.operations, lambda path: True)
    [html] = re.findall(r"<pre>(curl[^<]*/inference/v1/generate)</pre>", render(described))
    words = shlex.split(html.replace("&#39;", "'").replace("&#34;", '"'))
    assert "Authorization: Bearer KEY" in words
    async with running() as cluster:
        status, _ = await cluster.post(json.loads(words[words.index("-d") + 1]))
    assert status == 200


def test_examples() -> None:
    schemas = {"Item": {"type": "object", "required": ["role"], "properties": {"role": {"enum": ["user", "tool"]}}}}
    root = {"components": {"schemas": schemas}}
    assert example({"type": "array", "items": {"$ref": "#/components/schemas/Item"}}, root) == [{"role": "user"}]
    assert example({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}, root) == 5
    assert example({"type": "object"}, root) == {}
