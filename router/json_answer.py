"""Small answers that are one JSON object."""

from aiohttp import web
from pydantic import BaseModel


def json_answer(answer: BaseModel, status: int = 200) -> web.Response:
    """For answers that take no time to encode; others go through `router.serve`."""
    return web.Response(status=status, body=answer.model_dump_json().encode(), content_type="application/json")
