"""Options of a control request, from its query, its JSON body, or both; the body wins."""

from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from router.json_body import invalid, parse_body, read_bytes
from router.keys import UNKNOWN_FIELDS
from router.request_schemas import RequestModel

OptionsT = TypeVar("OptionsT", bound=RequestModel)


async def read_options(request: web.Request, cls: type[OptionsT], repeated: frozenset[str] = frozenset()) -> OptionsT:
    """The options; those named in `repeated` are lists, written as name=a&name=b in the query.

    Raises:
        InvalidRequestError: an option is wrong; `param` names it.
    """
    query = {name: request.query.getall(name) if name in repeated else text for name, text in request.query.items()}
    try:
        # Texts become what they stand for.
        options = cls.model_validate(query, strict=False)
    except ValidationError as error:
        raise invalid(error) from None
    if raw := await read_bytes(request):
        body = await parse_body(request, raw, cls, request.app[UNKNOWN_FIELDS])
        options = options.model_copy(update=body.model_dump(exclude_unset=True))
    return options
