"""The OpenAPI documents name what is there, and nothing else."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from aiohttp import web

from common.config import RouterSettings
from router.app import create_app, create_control_app
from router.openapi import document, json_text
from router.surface import CONTROL, PUBLIC, Surface
from tests.unit.router.cluster import running

DOCS = Path(__file__).parents[3] / "docs"


def served_routes(app: web.Application) -> set[tuple[str, str]]:
    return {
        (route.resource.canonical, route.method.lower())
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def test_every_route_has_an_operation_and_every_operation_a_route(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    public = create_app(RouterSettings())
    everything = create_app(RouterSettings(admin_on_public_port=True, admin_key_file=keys))
    for app, surface in (
        (public, PUBLIC),
        (create_control_app(public), CONTROL),
        (everything, PUBLIC.with_control()),
    ):
        operations = [(each.path, each.method) for each in surface.operations]
        assert set(operations) == served_routes(app)
        assert len(operations) == len(set(operations))


def references(value: object) -> Iterable[str]:
    """Every $ref below `value`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@pytest.mark.parametrize("surface", [PUBLIC, CONTROL, PUBLIC.with_control()])
def test_documents_are_whole(surface: Surface) -> None:
    described = document(surface.title, surface.operations)
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert set(references(described)) <= known
    ids = [each["operationId"] for item in described["paths"].values() for each in item.values()]
    assert len(ids) == len(set(ids)) == len(surface.operations)


async def test_it_is_served() -> None:
    async with running() as cluster:
        status, served = await cluster.get("/openapi.json")
    assert (status, served) == (200, document(PUBLIC.title, PUBLIC.operations))
    schemas = served["components"]["schemas"]
    wanted = {"GenerateRequest", "GenerateResponse", "GenerateStreamResponse", "GenerateResponseStreamChoice"}
    assert wanted <= set(schemas)
    assert "(p + g - 1 - start, num_layers, top_k)" in schemas["GenerateResponseChoice"]["description"]
    generate = served["paths"]["/inference/v1/generate"]["post"]
    assert {"400", "404", "408", "409", "413", "429", "500", "503"} < set(generate["responses"])
    assert "401" not in generate["responses"]
    assert set(generate["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "Retry-After" in generate["responses"]["503"]["headers"]


async def test_keys_are_documented_where_they_are_needed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    async with running(api_key_file=keys) as cluster, cluster.http.get("/openapi.json", headers=KEY) as response:
        served = await response.json()
    assert served["components"]["securitySchemes"]["bearer"] == {"type": "http", "scheme": "bearer"}
    generate, live = served["paths"]["/inference/v1/generate"]["post"], served["paths"]["/live"]["get"]
    assert generate["security"] == [{"bearer": []}, {"apiKey": []}]
    assert "401" in generate["responses"]
    assert "security" not in live
    assert "401" not in live["responses"]


KEY = {"Authorization": "Bearer k"}


@pytest.mark.parametrize(("name", "surface"), [("openapi.json", PUBLIC), ("openapi-control.json", CONTROL)])
def test_committed_documents_are_current(name: str, surface: Surface) -> None:
    assert (DOCS / name).read_text() == json_text(document(surface.title, surface.operations))
