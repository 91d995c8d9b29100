"""The solo run of a request: the value that every answer of a cluster must equal, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.engine.solo import SoloRunner
from common.kv.store import KVStore
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.runner import ModelRunner, kv_layout
from common.sampling import SamplingParams, TokenLogprob
from tests.e2e.cluster import Answer, JsonObject

BLOCK_SIZE = 16


def assert_equals_solo(
    answer: Answer,
    solo: SoloRunner,
    prompt: list[int],
    *,
    start: int = 0,
    context: int = 128,
    choice: int = 0,
    **fields: Any,
) -> None:
    """Tokens, logprobs (every bit), rows (dtype, shape, bytes) and the reason of the end."""
    assert answer.status == 200, answer.error
    max_tokens = min(fields.pop("max_tokens", context), context - len(prompt))
    stop_ids = frozenset(fields.pop("stop_token_ids", ()))
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_ids, **({"temperature": 0.0} | fields))
    expected = solo.run(prompt, params, start, choice=choice)
    assert answer.token_ids == [token.token_id for token in expected.tokens]
    assert answer.finish_reason == expected.finish.reason.value
    assert expected.rows_TLK is not None
    assert answer.rows.dtype == expected.rows_TLK.dtype
    assert np.array_equal(answer.rows, expected.rows_TLK)
    if params.logprobs is not None:
        # JSON carries doubles: a float32 that went through it comes back with every bit.
        for entry, token in zip(answer.logprobs, expected.tokens, strict=True):
            assert token.logprob is not None
            assert _record(entry) == _as_record(token.logprob)
            # The sampled token leads the alternatives, whether or not it is among the best.
            others = [_as_record(top) for top in token.top if top.token_id != token.token_id]
            assert [_record(top) for top in entry["top_logprobs"]] == [_as_record(token.logprob), *others]


def _record(entry: JsonObject) -> tuple[int, np.float32, int]:
    return entry["token_id"], np.float32(entry["logprob"]), entry["rank"]


def _as_record(value: TokenLogprob) -> tuple[int, np.float32, int]:
    return value.token_id, np.float32(value.logprob), value.rank


def solo_runner(model: Path, dtype: torch.dtype) -> SoloRunner:
    """A solo runner with the whole checkpoint in this process, and blocks for the longest request."""
    config, device = parse_config(model), torch.device("cpu")
    layout = kv_layout(config, BLOCK_SIZE, dtype)
    num_blocks = config.max_position_embeddings // BLOCK_SIZE + 2
    store = KVStore(layout, config.routing, num_blocks, device, poison=True)
    loaded = load_model(model, config, dtype, device, progress=False)
    return SoloRunner(ModelRunner(loaded.decoder, store), store, config.eos_token_ids)
