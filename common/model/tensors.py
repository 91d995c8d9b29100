"""Names and shapes of every tensor in a checkpoint. Imports no torch.

The loader checks a checkpoint against this list and the synthesizer writes exactly this list.
"""

from common.model.config import ModelConfig
from common.model.families import FAMILIES

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shape = tuple[int, ...]


def layer_tensor(layer: int, name: str) -> str:
    """Full name of a tensor inside decoder layer `layer`."""
    return f"model.layers.{layer}.{name}"


def router_tensor(config: ModelConfig, layer: int) -> str:
    return layer_tensor(layer, f"{FAMILIES[config.family].moe_block}.gate.weight")


def expert_tensors(config: ModelConfig, layer: int, expert: int) -> tuple[str, str, str]:
    """Names of one expert's gate, up and down projection."""
    family = FAMILIES[config.family]
    prefix = layer_tensor(layer, f"{family.moe_block}.experts.{expert}")
    gate, up, down = family.expert_projections
    return f"{prefix}.{gate}.weight", f"{prefix}.{up}.weight", f"{prefix}.{down}.weight"


def dense_tensors(layer: int) -> tuple[str, str, str]:
    """Names of a dense layer's gate, up and down projection."""
    prefix = layer_tensor(layer, "mlp")
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
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = {"q": q_size, "k": kv_size, "v": kv_size}
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (config.hidden_size,),
        "post_attention_layernorm.weight": (config.hidden_size,),
        "self_attn.o_proj.weight": (config.hidden_size, q_size),
    }
    shapes |= {f"self_attn.{name}_proj.weight": (width, config.hidden_size) for name, width in widths.items()}
    if config.attention_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (width,) for name, width in widths.items()}
        shapes["self_attn.o_proj.bias"] = (config.hidden_size,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return {layer_tensor(layer, name): shape for name, shape in shapes.items()}


def _feed_forward_shapes(names: tuple[str, str, str], hidden_size: int, width: int) -> dict[str, Shape]:
    return dict(zip(names, ((width, hidden_size), (width, hidden_size), (hidden_size, width)), strict=True))


def _dense_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    return _feed_forward_shapes(dense_tensors(layer), config.hidden_size, config.dense_size)


def _moe_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {router_tensor(config, layer): (config.num_experts, config.hidden_size)}
    for expert in range(config.num_experts):
        names = expert_tensors(config, layer, expert)
        shapes |= _feed_forward_shapes(names, config.hidden_size, config.expert_size)
    return shapes
