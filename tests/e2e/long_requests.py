"""Requests that take long enough for a test to do something to the workers that serve them."""

from collections.abc import Sequence

from tests.e2e.cluster import Answer, Client, until
from tests.e2e.test_routing_rows import prompt_of

#: So many tokens take seconds.
LONG = 800


async def generate(client: Client, index: int, num_tokens: int, *, length: int = 40, stream: bool = True) -> Answer:
    """So many tokens to a prompt of that length, another one for each index."""
    return await client.generate(prompt_of(length, index), stream=stream, max_tokens=num_tokens, ignore_eos=True)


async def until_decoding(client: Client, num_requests: int, num_tokens: int = 5) -> None:
    """All of them are past their prompts, on some worker each."""
    before = await client.metric("moerelay_generated_tokens_total", "decode")

    async def reached() -> bool:
        workers = (await client.json("/cluster"))["workers"]
        running = sum(worker["running"] or 0 for worker in workers if worker["role"] == "decode")
        generated = await client.metric("moerelay_generated_tokens_total", "decode")
        return bool(running >= num_requests and generated >= before + num_tokens * num_requests)

    await until(reached)


async def until_handing_over(client: Client, before: float) -> None:
    """More has arrived on decode workers than the `before` bytes."""

    async def begun() -> bool:
        return await handed_over(client) > before

    await until(begun)


async def handed_over(client: Client) -> float:
    """Bytes that have arrived on decode workers."""
    return await client.metric("moerelay_handoff_bytes_total", "decode")


def assert_ended(answers: Sequence[Answer], num_tokens: int) -> tuple[list[Answer], list[Answer]]:
    """Those that are complete, and those that failed and say so; nothing else."""
    complete = [answer for answer in answers if answer.error is None]
    failed = [answer for answer in answers if answer.error is not None]
    for answer in complete:
        assert (len(answer.token_ids), answer.finish_reason) == (num_tokens, "length")
    for answer in failed:
        assert answer.finish_reason is None
        assert answer.error is not None
        assert answer.error["code"] in (502, 503)
    return complete, failed
