"""Requests that begin alike, for engines with a prefix cache."""

from dataclasses import replace

import numpy as np

from common.engine.request import EngineRequest, RequestId
from common.sampling import SamplingParams


def prefixed_requests(vocab_size: int, count: int, *, block_size: int, max_blocks: int) -> list[EngineRequest]:
    """Two long prefixes, each cut after 1 to `max_blocks` blocks and continued differently; 1 to 2 choices."""
    random = np.random.default_rng(1)
    prefixes = [random.integers(3, vocab_size, max_blocks * block_size).tolist() for _ in range(2)]
    kinds = [
        SamplingParams(14, temperature=0, logprobs=2),
        SamplingParams(5, seed=3, prompt_logprobs=1),
        SamplingParams(16, seed=4, top_p=0.9, ignore_eos=True),
    ]
    return [
        EngineRequest(
            RequestId(f"r{i}"),
            prefixes[i % 2][: block_size * int(random.integers(1, max_blocks + 1))]
            + random.integers(3, vocab_size, random.integers(0, 14)).tolist(),
            replace(kinds[i % len(kinds)], n=1 + i % 2),
            routing_start=0,
        )
        for i in range(count)
    ]
