"""A "model" whose answers are arithmetic on the request, and a router that serves it over real HTTP."""

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from common.engine.solo import SoloResult
from common.routing.codec import numpy2base64
from common.routing.record import RoutingArray
from common.sampling import Finish, FinishReason, SampledToken, TokenLogprob
from deploy.verify.cases import Case

VOCAB, LAYERS, TOP_K, EXPERTS = 300, 2, 2, 8


@dataclasses.dataclass(frozen=True)
class Reply:
    """What one request gets, before it takes a wire form."""

    token_ids: list[int]
    logprobs: list[float] | None
    rows_TLK: RoutingArray


def reply_to(prompt: list[int], max_tokens: int, start: int, wants_logprobs: bool) -> Reply:
    token_ids = [(sum(prompt) + 7 * i) % VOCAB for i in range(max_tokens)]
    positions = np.arange(start, len(prompt) + max_tokens - 1)
    first_TL = (positions[:, None] + np.arange(LAYERS)) % EXPERTS
    rows_TLK = np.stack([first_TL, (first_TL + 3) % EXPERTS], axis=2).astype(np.uint8)
    logprobs = [float(np.float32(-1 / (3 + i))) for i in range(max_tokens)] if wants_logprobs else None
    return Reply(token_ids, logprobs, rows_TLK)


class ArithmeticOracle:
    """The solo run of that model."""

    dtype = torch.float32

    def answer(self, case: Case) -> SoloResult:
        sampling = case.sampling
        reply = reply_to(list(case.prompt), sampling.max_tokens, case.routing_start, sampling.logprobs is not None)
        tokens = [
            SampledToken(i, None if reply.logprobs is None else TokenLogprob(i, reply.logprobs[at], 1))
            for at, i in enumerate(reply.token_ids)
        ]
        return SoloResult(tuple(tokens), reply.rows_TLK, Finish(FinishReason.LENGTH))


#: Changes a reply before it is sent: the fault that a test wants to be found. The second argument tells if it streams.
Tamper = Callable[[Reply, bool], Reply]


class ArithmeticRouter:
    """Serves the model on /inference/v1/generate, in streams one token per event."""

    def __init__(
        self, max_model_len: int, tamper: Tamper = lambda reply, streamed: reply, *, routing: bool = True
    ) -> None:
        self._routing = routing
        self._max_model_len = max_model_len
        self._tamper = tamper
        #: Streams stop after so many events, without an end.
        self.break_after: int | None = None
        self.root: str | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "fake", "root": self.root, "max_model_len": self._max_model_len}
        return web.json_response({"data": [card]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if any(token_id >= VOCAB for token_id in body["token_ids"]):
            detail = {"message": "token_ids: too big", "type": "BadRequestError", "param": "token_ids", "code": 400}
            return web.json_response({"error": detail}, status=400)
        sampling = body["sampling_params"]
        max_tokens = min(sampling["max_tokens"], self._max_model_len - len(body["token_ids"]))
        start = sampling.get("routed_experts_prompt_start", 0)
        plain = reply_to(body["token_ids"], max_tokens, start, sampling.get("logprobs") is not None)
        reply = self._tamper(plain, bool(body.get("stream")))
        if not body.get("stream"):
            return web.json_response(
                self._switched({"usage": _usage(body, reply), "choices": [_choice(reply, 0, max_tokens)]})
            )
        final = body["stream_options"]["routed_experts"] == "final"
        return await self._stream(request, map(self._switched, _events(body, reply, start, final)))

    def _switched(self, body: dict[str, Any]) -> dict[str, Any]:
        """`body` without rows, if routing is off."""
        choices = body["choices"] if self._routing else [{**c, "routed_experts": None} for c in body["choices"]]
        return {**body, "choices": choices}

    async def _stream(self, request: web.Request, events: Iterator[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(events):
            if number == self.break_after:
                return response
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _usage(body: dict[str, Any], reply: Reply) -> dict[str, int]:
    p, g = len(body["token_ids"]), len(reply.token_ids)
    return {"prompt_tokens": p, "completion_tokens": g, "total_tokens": p + g}


def _choice(reply: Reply, begin: int, end: int) -> dict[str, Any]:
    """Tokens [begin, end) with their logprobs and all rows; the finish reason if these are the last ones."""
    logprobs = None
    if reply.logprobs is not None:
        pairs = zip(reply.token_ids[begin:end], reply.logprobs[begin:end], strict=True)
        entries = [{"token_id": token_id, "logprob": logprob, "rank": 1} for token_id, logprob in pairs]
        logprobs = {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}
    return {
        "index": 0,
        "token_ids": reply.token_ids[begin:end],
        "finish_reason": "length" if end >= len(reply.token_ids) else None,
        "stop_reason": None,
        "logprobs": logprobs,
        "routed_experts": numpy2base64(reply.rows_TLK),
    }


def _events(body: dict[str, Any], reply: Reply, start: int, final: bool) -> Iterator[dict[str, Any]]:
    num_prompt_rows = len(body["token_ids"]) - start
    for at in range(len(reply.token_ids)):
        choice = _choice(reply, at, at + 1)
        rows_TLK = reply.rows_TLK[num_prompt_rows + at - 1 : num_prompt_rows + at]
        if at == 0:
            rows_TLK = reply.rows_TLK[:num_prompt_rows]
        if final:
            choice["routed_experts"] = choice["routed_experts"] if choice["finish_reason"] else None
        else:
            choice["routed_experts"] = numpy2base64(rows_TLK)
        yield {"usage": None, "choices": [choice]}
    yield {"usage": _usage(body, reply), "choices": []}
