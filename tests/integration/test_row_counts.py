"""How many rows a batch has never shows: chunks of every size that could meet another kernel, beside any number of
decode steps, give the hidden states, rows, K and V of a sequence that was computed alone, bit for bit.

Shape suffixes: T tokens, H hidden size, L layers, C planes of the cache, G KV heads, D size of a cached vector.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

from common.kv.pool import BlockId
from common.kv.store import slots_of
from common.model.batch import Chunk
from common.model.decoder import MoeDecoder
from common.model.families import FAMILIES
from common.model.plan import plan_forward
from common.routing.capture import RoutingCapture
from common.routing.record import RoutingArray
from tests.unit.model.harness import BLOCK_SIZE, Harness, chunk, load_decoder, make_checkpoint

pytestmark = pytest.mark.slow

_SIZES = (1, 2, 3, 15, 16, 17, 31, 64, 255, 256, 257)
_NUM_DECODES = (0, 1, 2, 3, 7, 8, 14, 15, 16, 17, 31, 32, 33, 40)
#: Positions at which a chunk starts: at the beginning, inside a tile of keys, and so that it crosses into the next.
_STARTS = (0, 5, 250)
_DECODE_LENGTHS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 130, 255, 256, 257, 300, 511, 512, 513)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a hundredfold when test processes share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The fastest here, and what computes where those cannot."""
    name: str = request.param
    return name


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def decoder(
    family: str, kernels: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> MoeDecoder:
    path = tmp_path_factory.mktemp("model") / family
    return load_decoder(make_checkpoint(path, family, {}), request.param, kernels)


@dataclass(frozen=True)
class _Sequence:
    """A prompt, where its K and V are, and what it gave alone and in one chunk."""

    tokens: list[int]
    blocks: list[BlockId]
    hidden_TH: torch.Tensor
    rows_TLK: RoutingArray
    kv_LCTGD: torch.Tensor

    def chunk(self, start: int, end: int) -> Chunk:
        return chunk(self.tokens[start:end], start, self.blocks)

    @property
    def decode_step(self) -> Chunk:
        """Its last token."""
        return self.chunk(len(self.tokens) - 1, len(self.tokens))


class _Bench:
    """One decoder, and a store that keeps the sequences of a test."""

    def __init__(self, decoder: MoeDecoder) -> None:
        self._decoder = decoder
        self._harness = Harness(decoder, num_blocks=700)
        self._random = np.random.default_rng(0)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Hidden states of each chunk; stores what the runner stores."""
        store, config = self._harness.store, self._decoder.config
        plan = plan_forward(chunks, config, store, self._decoder.kernels)
        capture = RoutingCapture(config.routing, len(plan.token_ids_T), store.kv_LCSGD.device)
        hidden_TH = self._decoder.forward(plan, store.kv_LCSGD, capture)
        store.write_rows(plan.routed_slots, capture.take()[plan.routed_tokens])
        return [hidden_TH[row : row + len(c.token_ids)] for row, c in zip(plan.first_rows, chunks, strict=True)]

    def sequence(self, length: int) -> _Sequence:
        """Of random tokens, computed alone."""
        tokens = self._random.integers(0, self._decoder.config.vocab_size, length).tolist()
        blocks = self._harness.blocks_for(length)
        [hidden_TH] = self.forward([chunk(tokens, 0, blocks)])
        return _Sequence(
            tokens, blocks, hidden_TH, self._harness.rows(blocks, length), self._harness.kv(blocks, length)
        )

    def difference(self, sequence: _Sequence, part: Chunk, hidden_TH: torch.Tensor) -> str | None:
        """What of a chunk is not what it was alone."""
        span = slice(part.start, part.end)
        expected_TH = sequence.hidden_TH[span]
        slots = slots_of(part.blocks, part.start, part.end, BLOCK_SIZE)
        if not torch.equal(hidden_TH, expected_TH):
            rows = (hidden_TH != expected_TH).any(dim=1).nonzero().flatten().tolist()
            error = (hidden_TH.float() - expected_TH.float()).abs().max().item()
            return f"positions {part.start} to {part.end}: hidden rows {rows[:9]} differ by up to {error:.2e}"
        if not torch.equal(self._harness.store.read_kv(slots), sequence.kv_LCTGD[:, :, span]):
            return f"positions {part.start} to {part.end}: K or V differs"
        if not np.array_equal(self._harness.store.read_rows(slots), sequence.rows_TLK[span]):
            return f"positions {part.start} to {part.end}: routing rows differ"
        return None

    def check(self, batch: Sequence[tuple[_Sequence, Chunk]], words: str) -> list[str]:
        """Complaints about every chunk of the batch that is not what it was alone."""
        hidden = self.forward([part for _, part in batch])
        found = [self.difference(s, part, h_TH) for (s, part), h_TH in zip(batch, hidden, strict=True)]
        return [f"{words}: {complaint}" for complaint in found if complaint]


def test_one_chunk_beside_decode_steps(decoder: MoeDecoder) -> None:
    bench = _Bench(decoder)
    prompt = bench.sequence(max(_STARTS) + max(_SIZES))
    decoding = [bench.sequence(_DECODE_LENGTHS[i % len(_DECODE_LENGTHS)]) for i in range(max(_NUM_DECODES))]
    complaints = []
    for size, count, start in product(_SIZES, _NUM_DECODES, _STARTS):
        batch = [(prompt, prompt.chunk(start, start + size))]
        batch += [(sequence, sequence.decode_step) for sequence in decoding[:count]]
        complaints += bench.check(batch, f"chunk of {size} from {start}, {count} decodes")
    assert not complaints, "\n".join(complaints[:40])


def test_decode_steps_alone(decoder: MoeDecoder) -> None:
    bench = _Bench(decoder)
    decoding = [bench.sequence(_DECODE_LENGTHS[i % len(_DECODE_LENGTHS)]) for i in range(max(_NUM_DECODES))]
    complaints = []
    for count in range(1, len(decoding) + 1):
        batch = [(sequence, sequence.decode_step) for sequence in decoding[-count:]]
        complaints += bench.check(batch, f"{count} decodes")
    assert not complaints, "\n".join(complaints[:40])


def test_several_chunks_beside_decode_steps(decoder: MoeDecoder) -> None:
    bench = _Bench(decoder)
    prompts = [bench.sequence(max(_STARTS) + max(_SIZES)) for _ in range(3)]
    decoding = [bench.sequence(_DECODE_LENGTHS[-1 - i % len(_DECODE_LENGTHS)]) for i in range(17)]
    random = np.random.default_rng(1)
    complaints = []
    for _ in range(60):
        sizes, starts = random.choice(_SIZES, len(prompts)), random.choice(_STARTS, len(prompts))
        count = int(random.integers(0, len(decoding) + 1))
        spans = [(int(start), int(start + size)) for start, size in zip(starts, sizes, strict=True)]
        batch = [(prompt, prompt.chunk(*span)) for prompt, span in zip(prompts, spans, strict=True)]
        batch += [(sequence, sequence.decode_step) for sequence in decoding[:count]]
        complaints += bench.check(batch, f"chunks {spans}, {count} decodes")
    assert not complaints, "\n".join(complaints[:40])
