"""Streams that are read as bytes and looked into at their end, so that reading many takes little of the machine."""

import asyncio
import json

from tests.e2e.cluster import Answer, Client, request_body

#: After so many events a stream is under way.
EVENTS_UNDER_WAY = 5


class LateReader:
    """One request; `under_way` is set after some events, or at the end."""

    def __init__(self) -> None:
        self.under_way = asyncio.Event()

    async def read(self, client: Client, prompt: list[int], *, max_tokens: int) -> tuple[int, bytes]:
        """Status and body, whole; of a stream that ended or was broken off."""
        body, received = request_body(prompt, stream=True, max_tokens=max_tokens, ignore_eos=True), bytearray()
        try:
            async with client.session.post(f"{client.url}/inference/v1/generate", json=body) as response:
                async for piece in response.content.iter_any():
                    received += piece
                    if not self.under_way.is_set() and received.count(b"\n\n") >= EVENTS_UNDER_WAY:
                        self.under_way.set()
                return response.status, bytes(received)
        finally:
            self.under_way.set()


def answer_of(status: int, body: bytes) -> Answer:
    """Raises AssertionError if a stream has no proper end: [DONE] after a finish reason, or one error event."""
    if status != 200:
        return Answer(status, error=json.loads(body)["error"])
    *events, rest = body.split(b"\n\n")
    assert not rest, f"an unfinished event: {rest[:80]!r}"
    texts = [event.removeprefix(b"data: ").decode() for event in events]
    answer = Answer(status, ended_with_done=texts[-1] == "[DONE]")
    for text in texts[:-1] if answer.ended_with_done else texts:
        assert answer.error is None, "an event after an error"
        payload = json.loads(text)
        if "error" in payload:
            answer.error = payload["error"]
            continue
        for choice in payload["choices"]:
            answer.take(choice)
    assert answer.ended_with_done is not (answer.error is not None)
    assert answer.ended_with_done is (answer.finish_reason is not None)
    return answer
