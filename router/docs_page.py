"""The docs page: an OpenAPI document as one HTML file that needs nothing else, not even scripts."""

import json
import shlex
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, Template

Schema = dict[str, Any]

_REF = "#/components/schemas/"

#: Deeper examples help nobody, and a schema may hold itself.
_MAX_EXAMPLE_DEPTH = 6


def render(document: dict[str, Any]) -> str:
    """HTML of the whole document: routes by tag with a curl line each, then schemas."""
    operations = [
        {"path": path, "method": method, "curl": _curl(document, method, path, described), **described}
        for path, item in document["paths"].items()
        for method, described in item.items()
    ]
    tags = [tag["name"] for tag in document["tags"]]
    grouped = {tag: [each for each in operations if tag in each["tags"]] for tag in tags}
    return _template().render(
        info=document["info"], groups=grouped, schemas=document["components"]["schemas"], schema_name=_schema_name
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files("router") / "docs_page.html").read_text("utf-8"))


def _schema_name(reference: str) -> str:
    return reference.removeprefix(_REF)


def _curl(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    """A command that works when pasted, as far as a schema can tell."""
    words = ["curl", "-N"] if "text/event-stream" in operation["responses"]["200"]["content"] else ["curl"]
    if "security" in operation:
        words += ["-H", "Authorization: Bearer KEY"]
    body = operation.get("requestBody")
    if body:
        content = body["content"]["application/json"]
        value = content["examples"]["1"]["value"] if "examples" in content else example(content["schema"], document)
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(value)]
    elif method != "get":
        words += ["-X", method.upper()]
    return f"{shlex.join(words)} http://localhost:8000{path}"


def example(schema: Schema, document: dict[str, Any], depth: int = 0) -> Any:
    """A small value that fits: the schema's own example, or its required fields only."""
    if "$ref" in schema:
        return example(document["components"]["schemas"][_schema_name(schema["$ref"])], document, depth)
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    if "const" in schema:
        return schema["const"]
    if "properties" not in schema and (options := schema.get("anyOf") or schema.get("oneOf")):
        return example(options[0], document, depth)
    return _by_type(schema, document, depth)


def _by_type(schema: Schema, document: dict[str, Any], depth: int) -> Any:
    kind = schema.get("type")
    if kind == "object":
        required = schema.get("required", []) if depth < _MAX_EXAMPLE_DEPTH else []
        return {name: example(schema["properties"][name], document, depth + 1) for name in required}
    if kind == "array":
        return [example(schema.get("items", {}), document, depth + 1)] * max(1, schema.get("minItems", 1))
    if kind in ("integer", "number"):
        return max(1, schema.get("minimum", 1))
    return {"string": "text", "boolean": True}.get(str(kind))
