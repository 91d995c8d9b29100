"""How many tokens fit into a worker's KV cache, and into its context. Imports no torch, so that `moerelay up` can tell
before it starts anything.
"""

from common.config import ModelSettings
from common.errors import ConfigError
from common.model.config import ModelConfig

#: KV cache of a worker that was told nothing: enough for tens of thousands of tokens of a small model.
DEFAULT_KV_CACHE_BYTES = 2**30


def blocks_and_context(settings: ModelSettings, config: ModelConfig, dtype_bytes: int) -> tuple[int, int]:
    """Blocks of a worker's KV cache, and its context in tokens.

    Args:
        dtype_bytes: of one cached value.

    Raises:
        ConfigError: the KV cache is too small, or the context too long.
    """
    num_blocks = settings.num_kv_blocks or blocks_within(
        settings.kv_cache_memory, config, settings.block_size, dtype_bytes
    )
    return num_blocks, context_length(settings.max_model_len, config, num_blocks * settings.block_size)


def blocks_within(kv_cache_bytes: int | None, config: ModelConfig, block_size: int, dtype_bytes: int) -> int:
    """Blocks, with their routing rows, that so much memory holds; None: the default. Raises ConfigError."""
    token_bytes = config.num_layers * config.num_kv_planes * config.num_kv_heads * config.kv_dim * dtype_bytes
    block_bytes = block_size * (token_bytes + config.routing.row_bytes)
    budget = kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
    if budget < 2 * block_bytes:
        raise ConfigError(
            f"--kv-cache-memory of {budget} bytes holds fewer than 2 blocks of {block_bytes} bytes; "
            f"give at least {2 * block_bytes}"
        )
    return budget // block_bytes


def context_length(wanted: int | None, config: ModelConfig, capacity: int) -> int:
    """What was asked for if the checkpoint, and a KV cache of `capacity` tokens, allow it; None: the most that they
    allow. Raises ConfigError.
    """
    if wanted is None:
        return min(config.max_position_embeddings, capacity)
    longest = config.rope.longest_context(config.max_position_embeddings)
    if wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the {longest} positions that the checkpoint's "
            f"max_position_embeddings and rotary scaling allow; give at most {longest}"
        )
    if wanted > capacity:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the {capacity} tokens that the KV cache holds; "
            "lower it, or raise --kv-cache-memory or --num-kv-blocks"
        )
    return wanted
