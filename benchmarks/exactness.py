"""What exactness costs: a forward pass as served, and with the fastest kernels that torch offers instead, in turns.

Three conditions: "exact" is what --kernels auto takes here; "inexact" is what a server without the promise would use in
torch, namely products without padding, one softmax over all keys by torch's fused attention, `topk` instead of a stable
sort, the library's silu, and its bits depend on what else is in the batch; "torch" is what is served where there are no
native kernels, exact as well. Weights, cache and everything else are the same.

Shape suffixes: T tokens, N query heads, D head size, B sequences, G KV heads, R query rows of a KV head, E experts,
K experts per token, F width, I inputs, O outputs.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.table import Quantity, Samples, Series
from common.kv.pool import BlockId
from common.kv.store import KVStore
from common.model.attention import QueryGroup
from common.model.batch import Chunk
from common.model.config import ModelConfig
from common.model.decoder import MoeDecoder
from common.model.families import parse_config
from common.model.kernels.choice import choose_kernels
from common.model.loader import load_model
from common.model.moe import TorchExperts, grouped_linear
from common.model.router import TorchRouter
from common.model.runner import ModelRunner, kv_layout
from common.routing.capture import LayerRows

BLOCK_SIZE = 16
PREFILL_TOKENS = 256
NUM_WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory of grouped-query attention")
    parser.add_argument("--num-threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=20, help="steps per case and path (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every value to this file, by dtype")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    found: dict[str, list[Series]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        samples = _measure(arguments.model, dtype, arguments.repetitions)
        print(f"\n{name}\n")
        print("\n".join(samples.table(baseline="inexact")))
        found[name] = samples.to_json()
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


def _measure(path: Path, dtype: torch.dtype, repetitions: int) -> Samples:
    config = parse_config(path)
    served, in_torch = (_decoder(path, config, dtype, kernels) for kernels in ("auto", "torch"))
    print(f"\nexact: {served.kernels.name}")
    cases = {
        "decode C=1 at 96": _decodes(1, 96),
        "decode C=16 at 96": _decodes(16, 96),
        "decode C=16 at 1000": _decodes(16, 1000),
        "prefill 256 at 0": [_chunk(0, PREFILL_TOKENS, 0)],
        "prefill 256 at 1024": [_chunk(0, PREFILL_TOKENS, 1024)],
    }
    samples = Samples()
    for name, chunks in cases.items():
        num_blocks = 1 + max(block for chunk in chunks for block in chunk.blocks)
        store = KVStore(kv_layout(config, BLOCK_SIZE, dtype), config.routing, num_blocks, torch.device("cpu"))
        exact, fallback = ModelRunner(served, store), ModelRunner(in_torch, store)
        quantity = Quantity(name, "ms", higher_is_better=False)
        for repetition in range(NUM_WARM_UP + repetitions):
            with _inexact():
                inexact_ms = _milliseconds(fallback, chunks)
            measured = {
                "inexact": inexact_ms,
                "exact": _milliseconds(exact, chunks),
                "torch": _milliseconds(fallback, chunks),
            }
            for condition, taken_ms in measured.items() if repetition >= NUM_WARM_UP else ():
                samples.add(condition, quantity, taken_ms)
    return samples


def _decoder(path: Path, config: ModelConfig, dtype: torch.dtype, kernels: str) -> MoeDecoder:
    device = torch.device("cpu")
    chosen = choose_kernels(kernels, device, config)
    return load_model(path, config, dtype, device, progress=False, kernels=chosen).decoder


def _decodes(num_sequences: int, context: int) -> list[Chunk]:
    return [_chunk(sequence, 1, context) for sequence in range(num_sequences)]


def _chunk(sequence: int, num_tokens: int, start: int) -> Chunk:
    per_sequence = -(-(start + num_tokens) // BLOCK_SIZE)
    blocks = [BlockId(1 + sequence * per_sequence + at) for at in range(per_sequence)]
    token_ids = [(300 + 17 * sequence + at) % 30_000 for at in range(num_tokens)]
    return Chunk(token_ids, start, blocks, wants_logits=True, wants_rows=True)


def _milliseconds(runner: ModelRunner, chunks: Sequence[Chunk]) -> float:
    start = time.perf_counter()
    runner.execute(chunks)
    return 1e3 * (time.perf_counter() - start)


@contextmanager
def _inexact() -> Iterator[None]:
    """torch's kernels are the fastest ones meanwhile."""
    with (
        patch("common.model.layers._plain_product", F.linear),
        patch.object(TorchExperts, "forward", _experts),
        patch("common.model.layers.silu_gated", _silu_gated),
        patch.object(QueryGroup, "attend", _attend),
        patch.object(TorchRouter, "choose", _choose),
    ):
        yield


def _silu_gated(gate_up_TF: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _experts(experts: TorchExperts, x_RH: torch.Tensor, counts: list[int]) -> torch.Tensor:
    gate_up_RF = grouped_linear(x_RH, experts.gate_up, None, counts)
    return grouped_linear(_silu_gated(gate_up_RF), experts.down, None, counts)


def _choose(
    router: TorchRouter, x_TH: torch.Tensor, rows: LayerRows | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores_TE = torch.softmax(F.linear(x_TH, router.weight).float(), dim=-1)
    weights_TK, ids_TK = scores_TE.topk(router.top_k, dim=-1)
    if rows is not None:
        rows.write(ids_TK)
    return ids_TK, weights_TK / weights_TK.sum(dim=-1, keepdim=True) if router.config.normalize else weights_TK


def _attend(
    group: QueryGroup,
    q_TND: torch.Tensor,
    cache: torch.Tensor,
    num_kv_heads: int,
    *,
    value_dim: int | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """One gather of all keys and values that there are, one fused attention."""
    assert (value_dim, sinks_N) == (None, None), "only plain grouped-query attention is compared"
    assert all(tile.num_sequences == group.num_sequences for tile in group.tiles), "sequences are of one length here"
    num_tokens, num_heads, head_dim = q_TND.shape
    last_hidden = group.tiles[-1].hidden
    hidden_keys = 0 if last_hidden is None else int(last_hidden[0, 0, -1].sum())
    parts = [
        cache.index_select(0, tile.cache_rows).view(2, group.num_sequences, num_kv_heads, -1, head_dim)
        for tile in group.tiles
    ]
    kv = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
    k, v = kv[..., : kv.shape[3] - hidden_keys, :]
    q = q_TND.view(group.num_sequences, -1, num_heads, head_dim).transpose(1, 2)
    mask = None
    if num_tokens > group.num_sequences:
        positions_T = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        mask = torch.arange(k.shape[2]) <= positions_T
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
    return y.transpose(1, 2).reshape(num_tokens, num_heads, head_dim)


if __name__ == "__main__":
    main()
