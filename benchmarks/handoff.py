"""Rate of the handoff between two processes, beside plain pyzmq with the same frames and beside memcpy, in turns.

Sender, receiver and stores are those that the workers use: blocks are gathered, checksummed, sent, received, verified
and written into slots. Plain pyzmq (`raw_zmq`) sends as many frames of the same sizes from memory that nobody
gathers into memory that nobody reads; memcpy moves the same bytes within one process.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.raw_zmq import Message, RawSender, receive_raw
from benchmarks.table import Quantity, Samples
from common.engine.request import RequestId
from common.errors import HandoffError
from common.handoff.frames import TARGET_PAYLOAD_BYTES
from common.handoff.lease import LeaseRef
from common.handoff.messages import HandoffIdentity
from common.handoff.outgoing import OutgoingTransfer
from common.handoff.receiver import HandoffReceiver
from common.handoff.sender import HandoffSender
from common.handoff.transfer import Transfer
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
RANGE_TOKENS = 512
#: `--handoff-credit-bytes`.
CREDIT_BYTES = 64 * 2**20
TIMEOUT_S = 30.0

BLOCKS = [BlockId(block) for block in range(1, 1 + max(PROMPTS) // LAYOUT.block_size)]


#: A header's size, roughly.
HEADER = bytes(200)
HANDOFF, RAW, MEMCPY = "handoff", "pyzmq, copy=False", "memcpy"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15, help="handoffs per size (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every value to this file, by transport")
    arguments = parser.parse_args()
    found = measure(arguments.repetitions)
    for transport, samples in found.items():
        print(f"\n{transport}, ratios to {RAW}\n")
        print("\n".join(samples.table(baseline=RAW)))
    if arguments.json:
        arguments.json.write_text(json.dumps({transport: samples.to_json() for transport, samples in found.items()}))


def measure(repetitions: int) -> dict[str, Samples]:
    """By transport: `repetitions` values of every size under every condition, the conditions in turns."""
    torch.set_num_threads(1)
    store, found = _filled_store(), dict[str, Samples]()
    with tempfile.TemporaryDirectory(prefix="moerelay-") as directory:
        for name, template in {"ipc": f"ipc://{Path(directory)}/", "tcp": "tcp://127.0.0.1:0"}.items():
            endpoints = [template + (end if name == "ipc" else "") for end in ("handoff", "raw")]
            found[name] = Samples()
            with _peer(run_receiver, endpoints[0]) as pipe, _peer(receive_raw, endpoints[1]) as raw_pipe:
                asyncio.run(_send(store, pipe, raw_pipe, repetitions, found[name]))
    return found


@contextmanager
def _peer(run: Callable[[str, Connection], None], endpoint: str) -> Iterator[Connection]:
    """A process of its own, which lives as long as the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(endpoint, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


# --- the prefill worker's side


async def _send(store: KVStore, pipe: Connection, raw_pipe: Connection, repetitions: int, samples: Samples) -> None:
    raw = RawSender(await asyncio.to_thread(raw_pipe.recv))
    # Written once, so that no page of them is new when it is measured.
    source, target = np.ones(_num_bytes(max(PROMPTS)), np.uint8), np.zeros(_num_bytes(max(PROMPTS)), np.uint8)
    target[:] = 0
    async with (
        ZmqConnector() as connector,
        HandoffSender(connector, store, lambda: _identity("prefill"), timeout_s=TIMEOUT_S) as sender,
    ):
        # The first round connects, and touches every page once.
        for repetition in range(-1, repetitions):
            for num_tokens in PROMPTS:
                seconds = {
                    HANDOFF: await _hand_over(sender, pipe, num_tokens),
                    RAW: _timed(partial(raw.send, _messages(source.data, num_tokens))),
                    MEMCPY: _timed(
                        partial(np.copyto, target[: _num_bytes(num_tokens)], source[: _num_bytes(num_tokens)])
                    ),
                }
                for condition, taken in seconds.items() if repetition >= 0 else ():
                    rate = _num_bytes(num_tokens) / taken / 1e9
                    samples.add(condition, Quantity(f"{num_tokens} tokens", "GB/s", True), rate)
    raw.close()


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _num_bytes(num_tokens: int) -> int:
    """KV and rows."""
    return num_tokens * (LAYOUT.token_bytes + ROUTING.row_bytes)


def _messages(memory: memoryview, num_tokens: int) -> Iterator[Message]:
    """As many frames, of the sizes that a handoff of so many tokens sends, out of `memory`."""
    core = OutgoingTransfer(
        start=0,
        credit_bytes=CREDIT_BYTES,
        credit_chunks=1,
        token_bytes=LAYOUT.token_bytes + ROUTING.row_bytes,
        target_bytes=TARGET_PAYLOAD_BYTES,
    )
    for end in range(RANGE_TOKENS, num_tokens + 1, RANGE_TOKENS):
        for cut in core.split(end):
            begin, kv = core.position * LAYOUT.token_bytes, (cut.end - core.position) * LAYOUT.token_bytes
            rows = (cut.end - core.position) * ROUTING.row_bytes
            yield [HEADER, memory[begin : begin + kv], memory[begin : begin + rows], b""]
            core.position = cut.end


async def _hand_over(sender: HandoffSender, pipe: Connection, num_tokens: int) -> float:
    """Seconds from an open connection to the acknowledgement that every byte is in its slot."""
    pipe.send(num_tokens)
    lease: LeaseRef = await asyncio.to_thread(pipe.recv)
    start = time.perf_counter()
    async with sender.transfer(lease, routing=True) as transfer:
        await _send_prompt(transfer, num_tokens)
    return time.perf_counter() - start


async def _send_prompt(transfer: Transfer, num_tokens: int) -> None:
    for end in range(RANGE_TOKENS, num_tokens + 1, RANGE_TOKENS):
        await transfer.send_range(BLOCKS, transfer.position, end)
    await transfer.finish([SampledToken(0)], 1)


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
