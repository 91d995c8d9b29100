"""Names and shapes of every tensor in a checkpoint. Imports no torch.

The loader checks a checkpoint against this list and the synthesizer writes exactly this list.
"""

from common.model.config import GroupedAttention, LatentAttention, ModelConfig
from common.model.families import FAMILIES

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shape = tuple[int, ...]


def layer_tensor(layer: int, name: str) -> str:
    """Full name of a tensor inside decoder layer `layer`."""
    return f"model.layers.{layer}.{name}"


def moe_tensor(config: ModelConfig, layer: int, name: str) -> str:
    """Full name of a tensor inside the MoE block of a layer."""
    return layer_tensor(layer, f"{FAMILIES[config.family].names.block}.{name}")


def router_tensor(config: ModelConfig, layer: int, name: str = "weight") -> str:
    return moe_tensor(config, layer, f"{FAMILIES[config.family].names.router}.{name}")


def correction_tensor(config: ModelConfig, layer: int) -> str:
    """Name of what is added to the scores of the experts for the choice only.

    It is loaded in fp32, as published checkpoints store it; one that stores fewer bits is loaded too.
    """
    return router_tensor(config, layer, "e_score_correction_bias")


def has_fused_experts(config: ModelConfig) -> bool:
    """The projections of all experts are in one tensor each."""
    return FAMILIES[config.family].names.experts == "fused"


def expert_tensors(config: ModelConfig, layer: int, expert: int) -> tuple[str, str, str]:
    """Names of one expert's gate, up and down projection."""
    gate, up, down = FAMILIES[config.family].names.projections
    prefix = moe_tensor(config, layer, f"experts.{expert}")
    return f"{prefix}.{gate}.weight", f"{prefix}.{up}.weight", f"{prefix}.{down}.weight"


def fused_expert_tensors(config: ModelConfig, layer: int) -> tuple[str, str]:
    """Names of gate and up projection of all experts, [E, H, 2 F], and of their down projection, [E, F, H]."""
    return moe_tensor(config, layer, "experts.gate_up_proj"), moe_tensor(config, layer, "experts.down_proj")


def dense_tensors(layer: int) -> tuple[str, str, str]:
    """Names of a dense layer's gate, up and down projection."""
    return _projections(layer_tensor(layer, "mlp"))


def shared_tensors(config: ModelConfig, layer: int) -> tuple[str, str, str]:
    """Names of the shared network's gate, up and down projection."""
    return _projections(moe_tensor(config, layer, FAMILIES[config.family].names.shared))


def shared_gate_tensor(config: ModelConfig, layer: int) -> str:
    return moe_tensor(config, layer, f"{FAMILIES[config.family].names.shared_gate}.weight")


def _projections(prefix: str) -> tuple[str, str, str]:
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight"


def checkpoint_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every tensor that a checkpoint of this model holds."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= _attention_shapes(config, layer)
        shapes |= _moe_shapes(config, layer) if layer in config.moe_layers else _dense_shapes(config, layer)
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    attention = config.attention
    inner = _grouped_shapes(attention, hidden) if isinstance(attention, GroupedAttention) else {}
    if isinstance(attention, LatentAttention):
        inner = _latent_shapes(attention, hidden)
    shapes |= {f"self_attn.{name}": shape for name, shape in inner.items()}
    return {layer_tensor(layer, name): shape for name, shape in shapes.items()}


def _grouped_shapes(attention: GroupedAttention, hidden: int) -> dict[str, Shape]:
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    widths = {"q": q_size, "k": kv_size, "v": kv_size}
    shapes: dict[str, Shape] = {"o_proj.weight": (hidden, q_size)}
    shapes |= {f"{name}_proj.weight": (width, hidden) for name, width in widths.items()}
    if attention.qkv_bias:
        shapes |= {f"{name}_proj.bias": (width,) for name, width in widths.items()}
    if attention.out_bias:
        shapes["o_proj.bias"] = (hidden,)
    if attention.qk_norm is not None:
        over_all = attention.qk_norm == "all"
        shapes |= {f"{name}_norm.weight": (widths[name] if over_all else attention.head_dim,) for name in "qk"}
    if attention.sinks:
        shapes["sinks"] = (attention.num_heads,)
    return shapes


def _latent_shapes(attention: LatentAttention, hidden: int) -> dict[str, Shape]:
    query_size = attention.num_heads * (attention.plain_dim + attention.rotary_dim)
    kv_size = attention.num_heads * (attention.plain_dim + attention.value_dim)
    compressed = attention.kv_rank + attention.rotary_dim
    shapes: dict[str, Shape] = {
        "kv_a_proj_with_mqa.weight": (compressed, hidden),
        "kv_a_layernorm.weight": (attention.kv_rank,),
        "kv_b_proj.weight": (kv_size, attention.kv_rank),
        "o_proj.weight": (hidden, attention.num_heads * attention.value_dim),
    }
    if attention.query_rank is None:
        shapes["q_proj.weight"] = (query_size, hidden)
    else:
        shapes["q_a_proj.weight"] = (attention.query_rank, hidden)
        shapes["q_a_layernorm.weight"] = (attention.query_rank,)
        shapes["q_b_proj.weight"] = (query_size, attention.query_rank)
    if attention.bias:
        shapes |= {"kv_a_proj_with_mqa.bias": (compressed,), "o_proj.bias": (hidden,)}
        if attention.query_rank is not None:
            shapes["q_a_proj.bias"] = (attention.query_rank,)
    return shapes


def _feed_forward_shapes(names: tuple[str, str, str], hidden_size: int, width: int) -> dict[str, Shape]:
    return dict(zip(names, ((width, hidden_size), (width, hidden_size), (hidden_size, width)), strict=True))


def _dense_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    return _feed_forward_shapes(dense_tensors(layer), config.hidden_size, config.dense_size)


def _moe_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {router_tensor(config, layer): (config.num_experts, config.hidden_size)}
    if config.router.bias:
        shapes[router_tensor(config, layer, "bias")] = (config.num_experts,)
    if config.router.correction_bias:
        shapes[correction_tensor(config, layer)] = (config.num_experts,)
    shapes |= _fused_expert_shapes(config, layer) if has_fused_experts(config) else _expert_shapes(config, layer)
    if config.experts.shared_size is not None:
        names = shared_tensors(config, layer)
        shapes |= _feed_forward_shapes(names, config.hidden_size, config.experts.shared_size)
    if config.experts.shared_gate:
        shapes[shared_gate_tensor(config, layer)] = (1, config.hidden_size)
    return shapes


def _expert_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for expert in range(config.num_experts):
        names = expert_tensors(config, layer, expert)
        shapes |= _feed_forward_shapes(names, config.hidden_size, config.experts.size)
    return shapes


def _fused_expert_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    gate_up, down = fused_expert_tensors(config, layer)
    num_experts, size, hidden = config.num_experts, config.experts.size, config.hidden_size
    shapes: dict[str, Shape] = {gate_up: (num_experts, hidden, 2 * size), down: (num_experts, size, hidden)}
    if config.experts.bias:
        shapes |= {f"{gate_up}_bias": (num_experts, 2 * size), f"{down}_bias": (num_experts, hidden)}
    return shapes
