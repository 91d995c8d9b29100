"""OpenAPI 3.1 documents, generated from the pydantic schemas. `scripts/generate_openapi.py` writes them to docs/."""

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from router.operation import BODY_ERRORS, Operation
from router.response_schemas import ErrorResponse

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
_EVENTS = "text/event-stream"

#: What every route may answer: broken headers, and our own bugs.
_COMMON_ERRORS = (400, 500)

#: Statuses that come with a Retry-After header.
_RETRY = (429, 503)

_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}

_DESCRIPTION = (
    "Every error is an ErrorResponse. Unknown fields are ignored; an explicit null means absent. A client may name its "
    "request in the header X-Request-Id, 1 to 256 visible ASCII characters."
)


def json_text(described: dict[str, Any]) -> str:
    """A document as it is served and committed."""
    return json.dumps(described, indent=1) + "\n"


def document(
    title: str, operations: Sequence[Operation], needs_key: Callable[[str], bool] = lambda path: False
) -> dict[str, Any]:
    """The whole document as JSON values. `needs_key` tells of a path whether the client must send a key."""
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, needs_key(operation.path))
    components: dict[str, Any] = {"schemas": _schemas(operations)}
    if any(map(needs_key, paths)):
        components["securitySchemes"] = _SECURITY_SCHEMES
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version("moerelay"), "description": _DESCRIPTION},
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in operations)],
        "paths": paths,
        "components": components,
    }


def _schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    used: list[tuple[type[BaseModel], JsonSchemaMode]] = [(ErrorResponse, "serialization")]
    for operation in operations:
        if operation.body:
            used.append((operation.body, "validation"))
        answers = (operation.answer, operation.events, operation.refusal)
        used += [(model, "serialization") for model in answers if model]
    _, definitions = models_json_schema(sorted(set(used), key=lambda each: each[0].__name__), ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


def _operation(operation: Operation, needs_key: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {"200": _answer(operation)} | _errors(operation, needs_key),
    }
    if operation.query:
        described["parameters"] = _query(operation.query)
    if operation.body:
        content = _content(_JSON, operation.body)
        if operation.examples:
            content[_JSON]["examples"] = {
                str(number): {"value": value} for number, value in enumerate(operation.examples, 1)
            }
        described["requestBody"] = {"required": operation.body_required, "content": content}
    if needs_key:
        described["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    return described


def _query(model: type[BaseModel]) -> list[dict[str, Any]]:
    """One parameter per field; a nested model has no place in a query."""
    schema = model.model_json_schema()
    assert "$defs" not in schema, f"{model.__name__} is not flat"
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema["properties"].items()
    ]


def _answer(operation: Operation) -> dict[str, Any]:
    content = _content(_JSON, operation.answer) if operation.answer else _free(operation.media_type)
    if operation.events:
        content[_EVENTS] = _stream(operation.events)
    return {"description": operation.summary, "content": content}


def _free(media_type: str) -> dict[str, Any]:
    """An answer that no model describes: any JSON object, or text."""
    return {media_type: {"schema": {"type": "object" if media_type == _JSON else "string"}}}


def _stream(event: type[BaseModel]) -> dict[str, Any]:
    """Of one event, as OpenAPI 3.2 words it: an object whose `data` is text that holds JSON."""
    json_events = [{"contentMediaType": _JSON, "contentSchema": _ref(model)} for model in (event, ErrorResponse)]
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, *json_events]}
    text = f"Each event is a {event.__name__}; the last is [DONE], or an ErrorResponse if the stream broke."
    return {"schema": {"type": "object", "description": text, "properties": {"data": data}, "required": ["data"]}}


def _errors(operation: Operation, needs_key: bool) -> dict[str, Any]:
    statuses = {*operation.errors, *_COMMON_ERRORS, *(BODY_ERRORS if operation.body else ())}
    if needs_key:
        statuses.add(401)
    described = {str(status): _error(status) for status in sorted(statuses)}
    if operation.refusal:
        either = [_ref(ErrorResponse), _ref(operation.refusal)]
        described["400"]["content"] = {_JSON: {"schema": {"anyOf": either}}}
    return described


def _error(status: int) -> dict[str, Any]:
    described: dict[str, Any] = {
        "description": f"{HTTPStatus(status).phrase}.",
        "content": _content(_JSON, ErrorResponse),
    }
    if status in _RETRY:
        seconds = {"description": "Seconds.", "schema": {"type": "integer"}}
        described["headers"] = {"Retry-After": seconds}
    return described


def _content(media_type: str, model: type[BaseModel]) -> dict[str, Any]:
    return {media_type: {"schema": _ref(model)}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
