"""The OpenAPI 3.1 document, generated from the pydantic schemas. `scripts/generate_openapi.py` writes it to docs/."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from router.request_schemas import AbortRequestsRequest, GenerateRequest
from router.response_schemas import (
    AbortRequestsResponse,
    ClusterView,
    ErrorResponse,
    GenerateResponse,
    GenerateStreamResponse,
    HealthResponse,
    LiveResponse,
    ModelList,
    VersionResponse,
)

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. `answer` None: no JSON. `events`: what one event of the streaming answer holds."""

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()


OPERATIONS = (
    Operation(
        "post",
        "/inference/v1/generate",
        "Generate from token ids, with the experts of every position.",
        GenerateResponse,
        GenerateRequest,
        GenerateStreamResponse,
        (400, 404, 409, 413, 429, 500, 502, 503, 504),
    ),
    Operation(
        "post",
        "/inference/v1/abort_requests",
        "End live requests; each answers with what it has.",
        AbortRequestsResponse,
        AbortRequestsRequest,
        errors=(400, 404),
    ),
    Operation("get", "/live", "The process runs.", LiveResponse),
    Operation(
        "get", "/ready", "A pair of workers can serve and the router is not draining.", HealthResponse, errors=(503,)
    ),
    Operation("get", "/health", "A pair of workers can serve.", HealthResponse, errors=(503,)),
    Operation("get", "/v1/models", "The model that is served.", ModelList),
    Operation("get", "/cluster", "Every worker, its state and its load.", ClusterView),
    Operation("get", "/metrics", "Prometheus text of the router and its workers.", None),
    Operation("get", "/version", "Version of moerelay.", VersionResponse),
    Operation("get", "/openapi.json", "This document.", None),
)


def document() -> dict[str, Any]:
    """The whole document as JSON values."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "moerelay", "version": version("moerelay")},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


@cache
def document_json() -> str:
    """The document as it is served and committed."""
    return json.dumps(document(), indent=1) + "\n"


def _schemas() -> dict[str, Any]:
    used: list[tuple[type[BaseModel], JsonSchemaMode]] = [(ErrorResponse, "serialization")]
    for operation in OPERATIONS:
        if operation.body:
            used.append((operation.body, "validation"))
        used += [(model, "serialization") for model in (operation.answer, operation.events) if model]
    _, definitions = models_json_schema(sorted(set(used), key=lambda each: each[0].__name__), ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "responses": {"200": _answer(operation)}}
    if operation.body:
        described["requestBody"] = {"required": True, "content": _content("application/json", operation.body)}
    for status in operation.errors:
        described["responses"][str(status)] = {
            "description": "Error.",
            "content": _content("application/json", ErrorResponse),
        }
    return described


def _answer(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer:
        content |= _content("application/json", operation.answer)
    if operation.events:
        content |= _content("text/event-stream", operation.events)
    return {"description": operation.summary, **({"content": content} if content else {})}


def _content(media_type: str, model: type[BaseModel]) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _REF.format(model=model.__name__)}}}
