"""A "model" whose answers are arithmetic on the request, and a router that serves it over real HTTP.

Every field of the request that changes what a model generates changes the tokens here, so that a field that gets lost
is noticed.
"""

import dataclasses
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pybase64
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from common.engine.solo import SoloResult
from common.id_mask import pack_ids
from common.prompt_logprobs import ENTRY, PromptLogprobs
from common.routing.codec import numpy2base64
from common.routing.record import RoutingArray
from common.sampling import Finish, FinishReason, SampledToken, TokenLogprob
from deploy.verify.case import Case
from deploy.verify.vocabulary import Vocabulary
from router.text.pieces import piece_decoder
from router.text.tokenizer import Tokenizer

VOCAB, LAYERS, TOP_K, EXPERTS = 300, 2, 2, 8
WEIGHT_VERSION = "seven"

#: Every token stands for two letters.
TEXTS = [chr(ord("a") + i % 26) + chr(ord("a") + i // 26) for i in range(VOCAB)]

#: What is hashed into the tokens, by the request's name, with the value that changes nothing.
_HEARD: dict[str, object] = {
    "min_tokens": 0,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "logit_bias": {},
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
}


def fake_vocabulary() -> Vocabulary:
    backend = Backend(WordLevel({text: i for i, text in enumerate(TEXTS)}, unk_token=TEXTS[0]))
    return Vocabulary(Tokenizer(backend, piece_decoder({"type": "ByteLevel"}), {}), VOCAB)


@dataclasses.dataclass(frozen=True)
class Reply:
    """What one choice gets, before it takes a wire form."""

    token_ids: list[int]
    logprobs: list[float] | None
    rows_TLK: RoutingArray
    choice: int = 0
    masks: list[list[int]] | None = None
    stop: str | None = None


def reply_to(
    prompt: list[int], max_tokens: int, start: int, wants_logprobs: bool, *, choice: int = 0, flavour: int = 0
) -> Reply:
    token_ids = [(sum(prompt) + 7 * i + 31 * choice + flavour) % VOCAB for i in range(max_tokens)]
    positions = np.arange(start, len(prompt) + max_tokens - 1)
    first_TL = (positions[:, None] + np.arange(LAYERS)) % EXPERTS
    rows_TLK = np.stack([first_TL, (first_TL + 3) % EXPERTS], axis=2).astype(np.uint8)
    logprobs = [float(np.float32(-1 / (3 + i))) for i in range(max_tokens)] if wants_logprobs else None
    return Reply(token_ids, logprobs, rows_TLK, choice)


def flavour_of(heard: dict[str, object]) -> int:
    told = {name: value for name, value in heard.items() if value != _HEARD[name]}
    return zlib.crc32(json.dumps(told, sort_keys=True).encode()) % VOCAB if told else 0


class ArithmeticOracle:
    """The solo run of that model."""

    dtype = torch.float32

    def answer(self, case: Case) -> Sequence[SoloResult]:
        return [self._run(case, choice) for choice in range(case.sampling.n)]

    def _run(self, case: Case, choice: int) -> SoloResult:
        s = case.sampling
        wants_logprobs, flavour = s.logprobs is not None, flavour_of(_heard_by_solo(case))
        prompt = list(case.prompt)
        reply = reply_to(prompt, s.max_tokens, case.rows_from, wants_logprobs, choice=choice, flavour=flavour)
        tokens = [
            SampledToken(
                i,
                None if reply.logprobs is None else TokenLogprob(i, reply.logprobs[at], 1),
                mask=pack_ids((i, VOCAB + at)) if s.sampling_mask else None,
                weight_version=WEIGHT_VERSION,
            )
            for at, i in enumerate(reply.token_ids)
        ]
        scores = None
        if s.prompt_logprobs is not None:
            packed = [[(i, -i / 4, 1 + i)] * (1 + s.prompt_logprobs) for i in case.prompt]
            scores = PromptLogprobs(np.array(packed, ENTRY))
        return SoloResult(tuple(tokens), reply.rows_TLK, Finish(FinishReason.LENGTH), scores)


def _heard_by_solo(case: Case) -> dict[str, object]:
    s = case.sampling
    grammars: dict[str, object] = {
        "regex": {"regex": r"[a-z]{2,8}(-[a-z]{1,6}){0,3}"},
        "choice": {"choice": ["yes", "no", "maybe", "not-yet"]},
    }
    return {
        "min_tokens": s.min_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "seed": s.seed,
        "stop_token_ids": sorted(s.stop_token_ids),
        "ignore_eos": s.ignore_eos,
        "logit_bias": {str(token_id): bias for token_id, bias in s.logit_bias.items()},
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "repetition_penalty": s.repetition_penalty,
        "allowed_token_ids": sorted(s.allowed_token_ids) or None,
        "bad_words": list(case.text.bad_words) or None,
        "structured_outputs": None if case.text.grammar is None else grammars[case.text.grammar],
    }


Json = dict[str, Any]

#: Changes a choice's reply before it is worded: the fault that a test wants to be found. The second argument tells if
#: it streams.
Tamper = Callable[[Reply, bool], Reply]
#: Changes a whole answer, or one event. The second argument tells if it streams.
TamperJson = Callable[[Json, bool], Json]


class ArithmeticRouter:
    """Serves the model on /inference/v1/generate, in streams one token per event, the choices in turns."""

    def __init__(
        self,
        max_model_len: int,
        tamper: Tamper = lambda reply, streamed: reply,
        *,
        tamper_json: TamperJson = lambda body, streamed: body,
        deaf_to: str | None = None,
        routing: bool = True,
    ) -> None:
        """`deaf_to`: a sampling field that is not heard."""
        self._routing = routing
        self._max_model_len = max_model_len
        self._tamper = tamper
        self._tamper_json = tamper_json
        self._deaf_to = deaf_to
        #: Streams stop after so many events, without an end.
        self.break_after: int | None = None
        self.root: str | None = None
        #: Every request must bear it, if there is one.
        self.api_key: str | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        @web.middleware
        async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}":
                return await handler(request)
            detail = {"message": "which key?", "type": "AuthenticationError", "param": None, "code": 401}
            return web.json_response({"error": detail}, status=401)

        app = web.Application(middlewares=[require_key])
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
        sampling = {name: value for name, value in body["sampling_params"].items() if name != self._deaf_to}
        body = {**body, "sampling_params": sampling}
        streamed = bool(body.get("stream"))
        replies = [self._tamper(reply, streamed) for reply in self._replies(body)]
        wording = _Wording(body, routing=self._routing and sampling.get("return_routed_experts") is not False)
        if not streamed:
            return web.json_response(self._tamper_json(wording.whole(replies), False))
        events = (self._tamper_json(event, True) for event in wording.events(replies))
        return await self._stream(request, events)

    def _replies(self, body: Json) -> Iterator[Reply]:
        """All choices, each up to its stop string."""
        sampling, prompt = body["sampling_params"], body["token_ids"]
        max_tokens = min(sampling["max_tokens"], self._max_model_len - len(prompt))
        start = sampling.get("routed_experts_prompt_start", 0)
        flavour = flavour_of({name: sampling.get(name, neutral) for name, neutral in _HEARD.items()})
        wants_logprobs = sampling.get("logprobs") is not None
        for choice in range(sampling.get("n", 1)):
            reply = reply_to(prompt, max_tokens, start, wants_logprobs, choice=choice, flavour=flavour)
            if sampling.get("return_sampling_mask"):
                masks = [[token_id, VOCAB + at] for at, token_id in enumerate(reply.token_ids)]
                reply = dataclasses.replace(reply, masks=masks)
            yield _stopped(reply, sampling.get("stop") or [], sampling.get("min_tokens", 0), len(prompt) - start)

    async def _stream(self, request: web.Request, events: Iterator[Json]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(events):
            if number == self.break_after:
                return response
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _stopped(reply: Reply, stops: list[str], min_tokens: int, num_prompt_rows: int) -> Reply:
    """Cut behind the token in which a stop string ends, with its first or its second letter."""
    read = ""
    for at, token_id in enumerate(reply.token_ids):
        read += TEXTS[token_id]
        ended = [stop for stop in stops if read.endswith(stop) or read[:-1].endswith(stop)]
        if ended and at >= min_tokens:
            return _cut(reply, at + 1, ended[0], num_prompt_rows)
    return reply


def _cut(reply: Reply, num_tokens: int, stop: str, num_prompt_rows: int) -> Reply:
    return dataclasses.replace(
        reply,
        token_ids=reply.token_ids[:num_tokens],
        logprobs=reply.logprobs and reply.logprobs[:num_tokens],
        masks=reply.masks and reply.masks[:num_tokens],
        rows_TLK=reply.rows_TLK[: num_prompt_rows + num_tokens - 1],
        stop=stop,
    )


class _Wording:
    """The wire forms of the replies to one request."""

    def __init__(self, body: Json, *, routing: bool) -> None:
        self._prompt: list[int] = body["token_ids"]
        self._wants_prompt = bool(body.get("return_token_ids"))
        self._final = body.get("stream_options", {}).get("routed_experts") == "final"
        self._sampling: Json = body["sampling_params"]
        self._start: int = self._sampling.get("routed_experts_prompt_start", 0)
        self._routing = routing

    def whole(self, replies: Sequence[Reply]) -> Json:
        return {
            "usage": self._usage(replies),
            "prompt_token_ids": self._prompt if self._wants_prompt else None,
            "prompt_logprobs": self._prompt_logprobs(),
            "choices": [self._choice(reply, 0, len(reply.token_ids)) for reply in replies],
        }

    def events(self, replies: Sequence[Reply]) -> Iterator[Json]:
        first = True
        for at in range(max(len(reply.token_ids) for reply in replies)):
            for reply in replies:
                if at < len(reply.token_ids):
                    prompt = self._prompt if first and self._wants_prompt else None
                    yield {"usage": None, "prompt_token_ids": prompt, "choices": [self._event_choice(reply, at)]}
                    first = False
        yield {"usage": self._usage(replies), "prompt_token_ids": None, "choices": []}

    def _event_choice(self, reply: Reply, at: int) -> Json:
        choice = self._choice(reply, at, at + 1)
        ended = choice["finish_reason"] is not None
        choice["weight_versions"] = choice["weight_versions"] if ended else None
        num_prompt_rows = len(self._prompt) - self._start
        if self._final:
            choice["routed_experts"] = choice["routed_experts"] if ended else None
        elif at == 0:
            choice["routed_experts"] = self._rows(reply.rows_TLK[:num_prompt_rows], 0)
        else:
            first = num_prompt_rows + at - 1
            choice["routed_experts"] = self._rows(reply.rows_TLK[first : first + 1], first)
        return choice

    def _choice(self, reply: Reply, begin: int, end: int) -> Json:
        """Tokens [begin, end) with what is told about them and all rows; the finish reason if they are the last."""
        logprobs = None
        if reply.logprobs is not None:
            pairs = zip(reply.token_ids[begin:end], reply.logprobs[begin:end], strict=True)
            entries = [{"token_id": token_id, "logprob": logprob, "rank": 1} for token_id, logprob in pairs]
            logprobs = {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}
        ended = end >= len(reply.token_ids)
        return {
            "index": reply.choice,
            "token_ids": reply.token_ids[begin:end],
            "finish_reason": ("length" if reply.stop is None else "stop") if ended else None,
            "stop_reason": reply.stop if ended else None,
            "logprobs": logprobs,
            "sampling_mask": reply.masks and reply.masks[begin:end],
            "routed_experts": self._rows(reply.rows_TLK, 0),
            "weight_versions": [{"version": WEIGHT_VERSION, "start": 0, "end": len(reply.token_ids)}],
        }

    def _rows(self, rows_TLK: RoutingArray, first: int) -> str | Json | None:
        """`first`: how many rows the choice has had before."""
        if not self._routing:
            return None
        if self._sampling.get("routed_experts_format") != "dict":
            return numpy2base64(rows_TLK)
        return {
            "data": pybase64.b64encode_as_string(rows_TLK.tobytes()),
            "shape": list(rows_TLK.shape),
            "dtype": str(rows_TLK.dtype),
            "start": self._start + first,
        }

    def _prompt_logprobs(self) -> list[Json | None] | None:
        if self._sampling.get("prompt_logprobs") is None:
            return None
        scored = self._prompt[1:]
        return [None, *({str(i): {"logprob": -i / 4, "rank": 1 + i, "decoded_token": None}} for i in scored)]

    def _usage(self, replies: Sequence[Reply]) -> dict[str, int]:
        p, g = len(self._prompt), sum(len(reply.token_ids) for reply in replies)
        return {"prompt_tokens": p, "completion_tokens": g, "total_tokens": p + g}
