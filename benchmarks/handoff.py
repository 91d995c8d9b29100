"""Rate of the handoff between two processes, with the sender, receiver and stores that the workers use."""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.table import Quantity, Samples
from common.engine.request import RequestId
from common.errors import HandoffError
from common.handoff.leases import LeaseRef
from common.handoff.messages import HandoffIdentity
from common.handoff.receiver import HandoffReceiver
from common.handoff.sender import HandoffSender
from common.handoff.zmq_channel import ZmqConnector, ZmqListener
from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingLayout
from common.sampling import SampledToken

#: The cache of the "bench" preset: 12,288 bytes of K and V and 48 bytes of routing per token.
LAYOUT = KVLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.bfloat16)
ROUTING = RoutingLayout(num_layers=12, top_k=4, num_experts=32)
PROMPTS = (512, 2048, 8192)
#: What a prefill worker hands over at a time: `--max-num-batched-tokens`.
RANGE_TOKENS = 256
#: `--handoff-credit-bytes`.
CREDIT_BYTES = 64 * 2**20
TIMEOUT_S = 30.0

BLOCKS = [BlockId(block) for block in range(1, 1 + max(PROMPTS) // LAYOUT.block_size)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15, help="handoffs per size (default: %(default)s)")
    repetitions: int = parser.parse_args().repetitions
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="moerelay-") as directory:
        endpoints = {"ipc": f"ipc://{Path(directory) / 'handoff'}", "tcp": "tcp://127.0.0.1:0"}
        for name, endpoint in endpoints.items():
            _measure(name, endpoint, repetitions, samples)
    print("\n".join(samples.table(baseline="ipc")))


def _measure(name: str, endpoint: str, repetitions: int, samples: Samples) -> None:
    """The receiver in a process of its own, the sender in this one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=run_receiver, args=(endpoint, theirs), daemon=True)
    receiver.start()
    theirs.close()
    try:
        asyncio.run(_send(name, ours, repetitions, samples))
    finally:
        ours.close()
        receiver.join()


# --- the prefill worker's side


async def _send(name: str, pipe: Connection, repetitions: int, samples: Samples) -> None:
    torch.set_num_threads(1)
    store = _filled_store()
    async with (
        ZmqConnector() as connector,
        HandoffSender(connector, store, lambda: _identity("prefill"), timeout_s=TIMEOUT_S) as sender,
    ):
        await _hand_over(sender, pipe, max(PROMPTS))  # connects, and touches every page once
        for _ in range(repetitions):
            for num_tokens in PROMPTS:
                seconds = await _hand_over(sender, pipe, num_tokens)
                num_bytes = num_tokens * (LAYOUT.token_bytes + ROUTING.row_bytes)
                samples.add(name, Quantity(f"{num_tokens} tokens", "GB/s", True), num_bytes / seconds / 1e9)


async def _hand_over(sender: HandoffSender, pipe: Connection, num_tokens: int) -> float:
    """Seconds from an open connection to the acknowledgement that every byte is in its slot."""
    pipe.send(num_tokens)
    lease: LeaseRef = await asyncio.to_thread(pipe.recv)
    start = time.perf_counter()
    async with sender.transfer(lease, routing=True) as transfer:
        for end in range(RANGE_TOKENS, num_tokens + 1, RANGE_TOKENS):
            await transfer.send_range(BLOCKS, transfer.position, end)
        await transfer.finish([SampledToken(0)], 1)
    return time.perf_counter() - start


def _filled_store() -> KVStore:
    store = _new_store()
    store.kv_LCSGD.normal_()
    num_slots = len(store.rows_SLK)
    store.write_rows(np.arange(num_slots), np.zeros((num_slots, ROUTING.num_layers, ROUTING.top_k), ROUTING.dtype))
    return store


# --- the decode worker's side


def run_receiver(endpoint: str, pipe: Connection) -> None:
    """Grants a lease for each number of tokens that comes through the pipe, until it is closed."""
    torch.set_num_threads(1)
    asyncio.run(_receive(endpoint, pipe))


async def _receive(endpoint: str, pipe: Connection) -> None:
    store, handler = _new_store(), _Ends()
    async with (
        ZmqListener(endpoint) as listener,
        HandoffReceiver(
            listener,
            store,
            lambda: _identity("decode"),
            timeout_s=TIMEOUT_S,
            credit_bytes=CREDIT_BYTES,
            known_versions=lambda: {""},
            handler=handler,
        ) as receiver,
    ):
        while (num_tokens := await asyncio.to_thread(_next_request, pipe)) is not None:
            pipe.send(receiver.grant(RequestId("benchmark"), BLOCKS, num_tokens, 0, routing=True))
            await handler.wait()


def _next_request(pipe: Connection) -> int | None:
    try:
        num_tokens: int = pipe.recv()
        return num_tokens
    except EOFError:
        return None


class _Ends:
    """Waits for the end of one handoff after the other."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def wait(self) -> None:
        await self._ended.wait()
        self._ended.clear()

    def on_advanced(self, request_id: RequestId, computed: int) -> None:
        """The engine's business."""

    def on_prompt_logprobs(self, request_id: RequestId, entries: PromptLogprobs) -> None:
        """Nobody asks for them."""

    def on_complete(self, request_id: RequestId, first_tokens: Sequence[SampledToken], num_cached: int) -> None:
        self._ended.set()

    def on_failed(self, request_id: RequestId, error: HandoffError) -> None:
        """The sender raises the same error and ends the run."""
        self._ended.set()


# --- both sides


def _new_store() -> KVStore:
    return KVStore(LAYOUT, ROUTING, 1 + len(BLOCKS), torch.device("cpu"))


def _identity(instance_id: str) -> HandoffIdentity:
    return HandoffIdentity(
        instance_id=instance_id,
        fingerprint="benchmark",
        weight_version="0",
        numerics="benchmark",
        dtype="bfloat16",
        block_size=LAYOUT.block_size,
        num_layers=LAYOUT.num_layers,
        num_kv_planes=LAYOUT.num_planes,
        num_kv_heads=LAYOUT.num_kv_heads,
        head_dim=LAYOUT.head_dim,
        routing_dtype=ROUTING.dtype.name,
        top_k=ROUTING.top_k,
        num_experts=ROUTING.num_experts,
        routing_enabled=True,
        max_model_len=max(PROMPTS),
    )


if __name__ == "__main__":
    main()
