"""POST /skyrl/v1/generate: the vLLM dialect with the rows that SkyRL reads."""

from aiohttp import web

from router.generate import GENERATE_ERRORS, generate_as
from router.operation import Operation
from router.request_schemas import GenerateRequest
from router.response_schemas import GenerateResponse, GenerateStreamResponse


async def generate(request: web.Request) -> web.StreamResponse:
    """Rows are always an object, of the smallest of uint8, int16 and int32 that holds the values in it."""
    return await generate_as(request, endpoint="skyrl", form="skyrl")


OPERATIONS = (
    Operation(
        "post",
        "/skyrl/v1/generate",
        "As /inference/v1/generate, with rows as an object of the smallest of uint8, int16 and int32.",
        answer=GenerateResponse,
        body=GenerateRequest,
        events=GenerateStreamResponse,
        errors=GENERATE_ERRORS,
        examples=({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}},),
        tag="generation",
    ),
)
