"""How every endpoint that generates is asked, in one spelling, and how its answers are read into one form."""

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

JsonObject = dict[str, Any]
Rows = npt.NDArray[np.generic]


@dataclass
class Said:
    """One choice, whole or streamed. `shown` is the text after each event, None where the endpoint has no text."""

    token_ids: list[int] = field(default_factory=list)
    shown: list[str] | None = None
    finish: str | None = None
    stop_reason: int | str | None = None
    num_logprobs: int = 0
    row_parts: list[Rows] = field(default_factory=list)
    #: Reasons of an end that were given; one is right.
    num_finishes: int = 0
    #: Whether anything came after the reason of the end.
    went_on: bool = False

    @property
    def text(self) -> str | None:
        return None if self.shown is None else (self.shown or [""])[-1]

    @property
    def rows(self) -> Rows | None:
        return np.concatenate(self.row_parts) if self.row_parts else None

    def show(self, text: str) -> None:
        """Text that is new."""
        self.shown = self.shown or []
        self.shown.append((self.shown or [""])[-1] + text)

    def end(self, reason: str | None, stop_reason: int | str | None) -> None:
        self.went_on |= self.finish is not None
        if reason is not None:
            self.finish, self.stop_reason = reason, stop_reason
            self.num_finishes += 1


class Endpoint:
    """One route of the vLLM family that takes token ids: the spelling that the others are translated from."""

    #: What its prompts are called.
    prompt_field = "token_ids"
    has_text = False

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path

    def __repr__(self) -> str:
        return self.name

    def body(
        self,
        prompt: object,
        content: object = "a",
        *,
        stream: bool = False,
        request_id: str | None = None,
        **sampling: Any,
    ) -> JsonObject:
        """`prompt` as token ids; `content`, a user's words, is for the endpoint that takes messages."""
        return {"token_ids": prompt, "sampling_params": sampling, "stream": stream, "request_id": request_id}

    def spelled(self, name: str) -> str:
        """The endpoint's name of a field."""
        return name

    def raw(self, name: str, literal: str) -> bytes:
        """A request whose field has a value that only text can spell; `logit_bias.5` is inside an object."""
        outer, _, inner = name.partition(".")
        sampling: JsonObject = {outer: {inner: "@"} if inner else "@"}
        body = json.dumps(self.body([5], **sampling))
        assert body.count('"@"') == 1, body
        return body.replace('"@"', literal).encode()

    def read(self, payloads: Sequence[Any]) -> dict[int, Said]:
        """From a whole answer, or from all events of a stream: choices by index."""
        found: dict[int, Said] = {}
        for payload in payloads:
            for choice in payload["choices"]:
                self._take(found.setdefault(choice["index"], Said()), choice)
        return found

    def _take(self, said: Said, choice: JsonObject) -> None:
        said.end(choice["finish_reason"], choice["stop_reason"])
        said.token_ids += choice["token_ids"] or []
        said.num_logprobs += self._num_logprobs(choice["logprobs"])
        if choice["routed_experts"] is not None:
            said.row_parts.append(rows_of(choice["routed_experts"]))

    def _num_logprobs(self, logprobs: JsonObject | None) -> int:
        return len(logprobs["content"]) if logprobs else 0


class Completions(Endpoint):
    """Sampling fields are at the top."""

    prompt_field = "prompt"
    has_text = True

    def body(
        self,
        prompt: object,
        content: object = "a",
        *,
        stream: bool = False,
        request_id: str | None = None,
        **sampling: Any,
    ) -> JsonObject:
        options = {"stream_options": {"routed_experts": "delta"}} if stream else {}
        asked = {"prompt": prompt, "stream": stream, "request_id": request_id, "return_token_ids": True}
        return asked | options | sampling

    def _take(self, said: Said, choice: JsonObject) -> None:
        super()._take(said, choice)
        said.show(choice["text"])

    def _num_logprobs(self, logprobs: JsonObject | None) -> int:
        return len(logprobs["tokens"]) if logprobs else 0


class Chat(Completions):
    """Takes a user's words."""

    prompt_field = "messages"

    def body(
        self,
        prompt: object,
        content: object = "a",
        *,
        stream: bool = False,
        request_id: str | None = None,
        **sampling: Any,
    ) -> JsonObject:
        body = super().body(prompt, content, stream=stream, request_id=request_id, **sampling)
        del body["prompt"]
        if "logprobs" in sampling:
            body |= {"logprobs": True, "top_logprobs": sampling["logprobs"]}
        return {"messages": [{"role": "user", "content": content}]} | body

    def spelled(self, name: str) -> str:
        return "top_logprobs" if name == "logprobs" else name

    def _take(self, said: Said, choice: JsonObject) -> None:
        Endpoint._take(self, said, choice)
        said.show(choice["delta" if "delta" in choice else "message"]["content"])

    def _num_logprobs(self, logprobs: JsonObject | None) -> int:
        return len(logprobs["content"]) if logprobs else 0


class Sglang(Endpoint):
    """Other names, and events that repeat what came before."""

    prompt_field = "input_ids"
    has_text = True

    SAMPLING: ClassVar = {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "include_stop_str_in_output": "no_stop_trim",
    }
    TOP_LEVEL: ClassVar = {"logprobs": "top_logprobs_num", "routed_experts_prompt_start": "routed_experts_start_len"}

    def body(
        self,
        prompt: object,
        content: object = "a",
        *,
        stream: bool = False,
        request_id: str | None = None,
        **sampling: Any,
    ) -> JsonObject:
        top = {self.TOP_LEVEL[name]: sampling.pop(name) for name in self.TOP_LEVEL if name in sampling}
        if "top_logprobs_num" in top:
            top["return_logprob"] = True
        renamed = {self.SAMPLING.get(name, name): value for name, value in sampling.items()}
        asked = {"input_ids": prompt, "sampling_params": renamed, "stream": stream, "return_routed_experts": True}
        return asked | top | ({} if request_id is None else {"rid": request_id})

    def spelled(self, name: str) -> str:
        return (self.SAMPLING | self.TOP_LEVEL | {"request_id": "rid"}).get(name, name)

    def read(self, payloads: Sequence[Any]) -> dict[int, Said]:
        found: dict[int, Said] = {}
        for output in self._outputs(payloads):
            said, meta = found.setdefault(output.get("index", 0), Said()), output["meta_info"]
            assert output["output_ids"][: len(said.token_ids)] == said.token_ids
            assert output["text"].startswith(said.text or "")
            reason = meta["finish_reason"]
            said.end(reason and reason["type"], reason and reason.get("matched"))
            said.show(output["text"].removeprefix(said.text or ""))
            said.token_ids = output["output_ids"]
            said.num_logprobs = len(meta.get("output_token_logprobs", []))
            if "routed_experts" in meta:
                flat = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), "<i4")
                said.row_parts.append(flat.reshape(-1, 2, 2))
        return found

    def _outputs(self, payloads: Sequence[JsonObject | list[JsonObject]]) -> Iterator[JsonObject]:
        for payload in payloads:
            if isinstance(payload, list):
                yield from ({"index": at} | each for at, each in enumerate(payload))
            else:
                yield payload


def rows_of(value: str | JsonObject) -> Rows:
    """From vLLM's base64 of an .npy file, or from an object with shape and dtype."""
    if isinstance(value, str):
        array: Rows = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
        return array
    return np.frombuffer(base64.b64decode(value["data"], validate=True), value["dtype"]).reshape(value["shape"])


GENERATE = Endpoint("generate", "/inference/v1/generate")
SKYRL = Endpoint("skyrl", "/skyrl/v1/generate")
COMPLETIONS = Completions("completions", "/v1/completions")
CHAT = Chat("chat", "/v1/chat/completions")
SGLANG = Sglang("sglang", "/generate")

#: Every route that generates.
ENDPOINTS = (GENERATE, SKYRL, COMPLETIONS, CHAT, SGLANG)
