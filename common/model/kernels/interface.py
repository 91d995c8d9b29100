"""What a set of kernels offers. A decoder is built from one set, and calls nothing else for the bulk of its work.

In every set a row of a result depends on its own row of the input only, bit for bit, however many rows there are; on
the CPU that is tested for each. Two sets do not compute the same bits, so workers of one cluster use the same one
(their numerics fingerprint tells).

Shape suffixes: T tokens (rows), I inputs, O outputs, H hidden size, F feed-forward width, E experts, K experts per
token, N query heads, G KV heads, D size of a cached vector, V of its value, C planes of the cache, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from common.kv.store import KVLayout
from common.model.batch import Chunk
from common.model.config import ExpertsConfig, GroupedAttention, RouterConfig
from common.model.rope import Angles
from common.routing.capture import LayerRows, RoutingCapture

if TYPE_CHECKING:
    from common.model.decoder import DecoderLayer
    from common.model.plan import ForwardPlan


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [O, I] in the layout that the kernels read it in."""

    data: torch.Tensor
    num_outputs: int
    num_inputs: int


class Linear(Protocol):
    """`x @ weight.T + bias`, or a whole feed-forward block."""

    def __call__(self, x_TI: torch.Tensor, /) -> torch.Tensor:
        """[T, O]"""
        ...


class Router(Protocol):
    """Chooses each token's experts."""

    def choose(self, x_TH: torch.Tensor, rows: LayerRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and fp32 weights, both [T, K], by descending selection score, ties by the lower id.

        The ids are recorded in `rows` if it is given.
        """
        ...


class Experts(Protocol):
    """All experts of a layer."""

    def __call__(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, added in the order of the choice, [T, H]."""
        ...


class Heads(Protocol):
    """Takes the fused product of queries, keys and values apart."""

    def split(
        self, fused_TO: torch.Tensor, angles: Angles, slots_T: torch.Tensor, kv_CSGD: torch.Tensor
    ) -> torch.Tensor:
        """Norms, bounds and rotates; writes keys and values into their slots; returns the scaled queries [T, N, D]."""
        ...


class AttentionPlan(Protocol):
    """Which cached keys the tokens of one batch attend to; the same in every layer."""

    def attend(
        self,
        q_TND: torch.Tensor,
        kv_CSGD: torch.Tensor,
        *,
        window: int | None = None,
        value_dim: int | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output [T, N, V] for (already scaled) queries over one layer of the store.

        Args:
            window: keys that a query sees, itself included; None: all up to its own.
            value_dim: V, the leading dimensions of a cached value, or of the cached key if there is only one plane.
                None: all D.
            sinks_N: fp32 logits of the sinks; None where there are none.
        """
        ...


class Stack(Protocol):
    """All layers of a decoder at once."""

    def forward(
        self,
        x_TH: torch.Tensor,
        angles: Angles,
        plan: "ForwardPlan",
        kv_LCSGD: torch.Tensor,
        capture: RoutingCapture | None,
    ) -> torch.Tensor:
        """Last hidden states [T, H] from embedded tokens, which it overwrites; see `MoeDecoder.forward`."""
        ...


class Kernels(Protocol):
    """One set; used by any thread."""

    @property
    def name(self) -> str:
        """As --kernels spells it; shown by `moerelay doctor` and in /cluster."""
        ...

    def pack(self, weight_OI: torch.Tensor, *, fused: bool = False) -> PackedWeight:
        """Prepares a weight; `fused` ones are gate rows, then as many up rows."""
        ...

    def copies(self, weight_OI: torch.Tensor) -> bool:
        """Whether packing a weight like this one copies it. Where it does not, the data are the tensor itself."""
        ...

    def linear(self, weight: PackedWeight, bias_O: torch.Tensor | None = None) -> Linear: ...

    def gated(self, gate_up: PackedWeight, down: PackedWeight) -> Linear:
        """`down(silu(gate) * up)`: the block of a dense layer. `gate_up` is packed as fused."""
        ...

    def router(
        self,
        config: RouterConfig,
        top_k: int,
        weight_EH: torch.Tensor,
        bias_E: torch.Tensor | None,
        correction_E: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> Router:
        """The weight is in the model's `dtype`, or in fp32 where `config` says so; it is not packed yet."""
        ...

    def experts(
        self,
        config: ExpertsConfig,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        gate_up_bias_EO: torch.Tensor | None,
        down_bias_EH: torch.Tensor | None,
    ) -> Experts:
        """`gate_up` are packed as fused, and their biases are gate, then up: [E, 2 F]."""
        ...

    def heads(self, config: GroupedAttention, qk_norm: torch.Tensor | None, eps: float, dtype: torch.dtype) -> Heads:
        """`qk_norm`: fp32 [N + G, D], norm weights of query and key heads; None for families without QK norm.

        `dtype` is the model's.
        """
        ...

    def plan_attention(
        self,
        chunks: Sequence[Chunk],
        num_heads: int,
        windows: frozenset[int | None],
        layout: KVLayout,
        num_slots: int,
        device: torch.device,
    ) -> AttentionPlan:
        """Chunks in the order of the batch, those of one token first, of these the longest sequence first."""
        ...

    def add_norm(
        self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds `delta_TH` to `x_TH` in place, and returns the root-mean-square norm of the sum."""
        ...

    def stack(self, layers: Sequence["DecoderLayer"], eps: float) -> Stack | None:
        """All layers (built from these kernels) as one, with the bits that they have one by one; None if there is no
        such thing for layers like these.
        """
        ...
