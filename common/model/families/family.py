"""What one MoE family is: how its config.json reads, how its tensors are named, and what a synthetic one says.

A module of this package reads the keys that are its family's own and leaves the rest to `read_model`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from common.model.config import AttentionConfig, ExpertsConfig, GroupedAttention, ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader
from common.model.rope_config import read_rope, read_rotary_share


def _nothing(common: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names inside a decoder layer, as far as families differ in them."""

    #: The MoE block, and the router in it.
    block: str = "mlp"
    router: str = "gate"
    #: Gate, up and down projection of an expert.
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    #: "each": three tensors per expert. "fused": the projections of all experts in one tensor each, [E, in, out], gate
    #: and up columns alternating.
    experts: Literal["each", "fused"] = "each"
    #: The network that every token goes through.
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    model_type: str
    architecture: str
    #: Raises CheckpointError for whatever the family does not allow.
    read: Callable[[ConfigReader], ModelConfig]
    #: Spellings of the number of experts; the first is the one that hub checkpoints use.
    num_experts_keys: tuple[str, ...]
    names: TensorNames = TensorNames()
    #: Keys of a synthetic config.json beside those that every family has, or instead of them; told what those are.
    synthetic: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing
    #: Keys that every synthetic config.json has but this family's.
    synthetic_without: frozenset[str] = frozenset()
    #: Key of an expert's width.
    expert_size_key: str = "moe_intermediate_size"


def read_model(
    reader: ConfigReader,
    family: str,
    *,
    attention: AttentionConfig,
    experts: ExpertsConfig,
    router: RouterConfig,
    moe_layers: frozenset[int],
    dense_size: int,
    rope_theta: float,
    rms_norm_eps: float,
    sliding_windows: Sequence[int | None] | None = None,
    rope_section: Mapping[str, object] | None = None,
    dtype: str = "float32",
    num_extra_layers: int = 0,
) -> ModelConfig:
    """Adds what every family spells alike.

    Args:
        rope_theta: what transformers assumes when the key is absent; likewise `rms_norm_eps`.
        sliding_windows: one per layer; None: full attention in all of them.
        rope_section: what transformers assumes when no key says how positions are scaled.
        dtype: that of the weights when no key gives it.
        num_extra_layers: layers behind the last one that predict further tokens.
    """
    num_layers = reader.count("num_hidden_layers")
    windows = tuple(sliding_windows or [None] * num_layers)
    _check_layer_types(reader, windows)
    return ModelConfig(
        family=family,
        vocab_size=reader.count("vocab_size"),
        hidden_size=reader.count("hidden_size"),
        num_layers=num_layers,
        attention=attention,
        experts=experts,
        router=router,
        top_k=reader.count("num_experts_per_tok"),
        dense_size=dense_size,
        moe_layers=moe_layers,
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        rms_norm_eps=reader.number("rms_norm_eps", default=rms_norm_eps),
        max_position_embeddings=reader.count("max_position_embeddings"),
        rope=read_rope(reader, rope_theta, attention.rotary_dim, default_section=rope_section),
        sliding_windows=windows,
        dtype=reader.text("dtype", "torch_dtype", default=dtype).removeprefix("torch."),
        num_extra_layers=num_extra_layers,
    )


def _check_layer_types(reader: ConfigReader, windows: Sequence[int | None]) -> None:
    """Families that do not read `layer_types` may say it nevertheless, but not something else than is computed."""
    kinds = reader.raw("layer_types")
    if kinds is None:
        return
    is_list = isinstance(kinds, list) and len(kinds) == len(windows)
    if not is_list or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        wanted = f"'full_attention' or 'sliding_attention' for each of the {len(windows)} layers"
        reader.fail("layer_types", kinds, wanted)
    if [kind == "sliding_attention" for kind in kinds] != [window is not None for window in windows]:
        windowed = [layer for layer, window in enumerate(windows) if window is not None]
        wanted = f"'sliding_attention' in layers {windowed} only, where the other settings put a window"
        reader.fail("layer_types", kinds, wanted)


def read_windows(reader: ConfigReader, default: int, windowed: Collection[int]) -> tuple[int | None, ...]:
    """Windows of a family in which `layer_types` says which layers have one, of `sliding_window` keys each.

    Args:
        default: the window if the key is absent.
        windowed: layers that have one if `layer_types` is absent.
    """
    kinds = reader.raw("layer_types")
    if isinstance(kinds, list):
        windowed = {layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    window = reader.count_not_null("sliding_window", default=default) if windowed else None
    return tuple(window if layer in windowed else None for layer in range(reader.count("num_hidden_layers")))


def read_grouped_attention(
    reader: ConfigReader,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["head", "all", None] = None,
    clip_qkv: float | None = None,
    sinks: bool = False,
    default_rotary_share: float | None = None,
    default_head_dim: int | None = None,
    default_num_kv_heads: int | None = None,
) -> GroupedAttention:
    """Heads from the keys that all families spell alike.

    Args:
        default_rotary_share: that of `read_rotary_share`.
        default_head_dim: where the key is absent; None, like a key that is null: its part of the hidden size.
        default_num_kv_heads: where the key is absent; None, like a key that is null: as many as query heads.
    """
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    num_kv_heads = reader.optional_count("num_key_value_heads", default=default_num_kv_heads) or num_heads
    head_dim = reader.optional_count("head_dim", default=default_head_dim) or max(hidden_size // num_heads, 1)
    if num_heads % num_kv_heads:
        reader.fail("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} attention heads")
    rotary_dim = int(head_dim * read_rotary_share(reader, default_rotary_share))
    if rotary_dim % 2 or not rotary_dim:
        reader.fail("head_dim", head_dim, "such that an even number of dimensions rotates")
    return GroupedAttention(num_heads, num_kv_heads, head_dim, rotary_dim, qkv_bias, out_bias, qk_norm, clip_qkv, sinks)


def all_but_first_layers(reader: ConfigReader, *, default: int) -> frozenset[int]:
    """MoE layers of a family whose first `first_k_dense_replace` layers are dense."""
    return frozenset(range(reader.whole("first_k_dense_replace", default=default), reader.count("num_hidden_layers")))


def sparse_step_layers(reader: ConfigReader) -> frozenset[int]:
    """MoE layers of a family in which every `decoder_sparse_step`-th layer is one, but for `mlp_only_layers`."""
    step, dense = reader.count("decoder_sparse_step", default=1), set(reader.integers("mlp_only_layers"))
    num_layers = reader.count("num_hidden_layers")
    return frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
