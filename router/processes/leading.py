"""Control routes are carried out by one process, whichever takes the request: what they must not mix is known there."""

from aiohttp import web
from aiohttp.typedefs import Handler

from router.control.routes import CONTROL_ROUTES
from router.json_body import read_bytes
from router.keys import SIBLINGS

_CONTROL_PATHS = frozenset(route.path for route in CONTROL_ROUTES)


@web.middleware
async def lead(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Hands control requests to process 0, which tells the others to look at the workers before it answers."""
    resource = request.match_info.route.resource
    if resource is None or resource.canonical not in _CONTROL_PATHS:
        return await handler(request)
    siblings = request.app[SIBLINGS]
    if not siblings.leads:
        return await siblings.forward(request, await read_bytes(request))
    try:
        return await handler(request)
    finally:
        if request.method == "POST":
            await siblings.refresh()
