"""Where a forward pass spends its time: milliseconds per step without any server, and its most expensive operators."""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from common.kv.pool import BlockId
from common.kv.store import KVStore
from common.model.batch import Chunk
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.runner import ModelRunner, kv_layout

BLOCK_SIZE = 16
#: Cache of a decoding sequence, as in the middle of a request of the serving benchmark.
CONTEXT_TOKENS = 96
PREFILL_TOKENS = 256
NUM_OPERATORS = 18


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--num-threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=20, help="timed steps per case (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    runner = _load(arguments.model)
    cases = {
        "decode, 1 sequence": _decode_batch(1),
        "decode, 16 sequences": _decode_batch(16),
        f"prefill, {PREFILL_TOKENS} tokens": [_chunk(0, range(PREFILL_TOKENS), 0)],
    }
    for name, chunks in cases.items():
        print(f"\n{name}: {_milliseconds(runner, chunks, arguments.repetitions):.1f} ms")
        print(_operators(runner, chunks, arguments.repetitions))


def _load(path: Path) -> ModelRunner:
    config = parse_config(path)
    loaded = load_model(path, config, torch.bfloat16, torch.device("cpu"), progress=False)
    layout = kv_layout(config, BLOCK_SIZE, torch.bfloat16)
    store = KVStore(layout, config.routing, 512, torch.device("cpu"))
    return ModelRunner(loaded.decoder, store)


def _decode_batch(num_sequences: int) -> list[Chunk]:
    return [_chunk(i, [300 + 17 * i], CONTEXT_TOKENS) for i in range(num_sequences)]


def _chunk(sequence: int, token_ids: Sequence[int], start: int) -> Chunk:
    blocks_per_sequence = PREFILL_TOKENS // BLOCK_SIZE
    first = 1 + sequence * blocks_per_sequence
    blocks = [BlockId(block) for block in range(first, first + blocks_per_sequence)]
    return Chunk(token_ids, start, blocks, wants_logits=True, wants_rows=True)


def _milliseconds(runner: ModelRunner, chunks: Sequence[Chunk], repetitions: int) -> float:
    """Median, after a few steps that do not count."""
    times = []
    for _ in range(3 + repetitions):
        start = time.perf_counter()
        runner.execute(chunks)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[3:])


def _operators(runner: ModelRunner, chunks: Sequence[Chunk], repetitions: int) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(repetitions):
            runner.execute(chunks)
    table: str = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=NUM_OPERATORS)
    return table


if __name__ == "__main__":
    main()
