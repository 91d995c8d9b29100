"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over the compressed vectors themselves.

Keys and values of all heads are products of one vector per token, c, which is cached together with the rotated key that
all heads share: [c | k]. A query's product with a key, q · (W_k c), is (W_k^T q) · c, and a weighted sum of values,
sum(w W_v c), is W_v sum(w c); so each query is brought into the space of c, attends there as one of N heads that share
one key, and its output is brought back. No key or value is ever expanded, in a prompt as little as later on: both
orders of multiplication round differently, and a token must not depend on which step computed it.

Shape suffixes: T tokens, H hidden size, N query heads, P dimensions of a head that do not rotate, E dimensions that do,
C dimensions of the compressed vector, V value dimensions of a head, S slots.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.model.config import LatentAttention
from common.model.kernels.interface import Linear
from common.model.layers import per_head_product
from common.model.plan import ForwardPlan
from common.model.rope import Angles, CosSin, rotate

#: Of the norms of compressed vectors: DeepSeek's own, whatever the model's other norms have.
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class CompressedQuery:
    """The way of a query through a compressed vector of its own."""

    #: From H inputs to the Q of the compressed vector.
    down: Linear
    #: [Q]
    norm: torch.Tensor

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """What the queries of all heads are projected from, [T, Q]."""
        return _rms_norm(self.down(x_TH), self.norm)


@dataclass(frozen=True, slots=True)
class MultiHeadLatentAttention:
    """The attention block of one layer.

    Rotated dimensions are in the order of `common.model.rope.rotate`: pairs that a checkpoint interleaves are taken
    apart when its projections are loaded.
    """

    config: LatentAttention
    #: None: queries are projected from the hidden state.
    compressed_query: CompressedQuery | None
    #: From H inputs, or Q if queries are compressed, to N (P + E) outputs.
    query: Linear
    #: To C + E outputs: the compressed vector, then the rotated key.
    key_value: Linear
    #: [C]
    key_value_norm: torch.Tensor
    #: [N, P, C]: from a head's query to the space of the compressed vector.
    absorb_NPC: torch.Tensor
    #: [N, C, V]: from there to a head's output.
    expand_NCV: torch.Tensor
    #: From N V inputs.
    out: Linear

    def forward(self, x_TH: torch.Tensor, angles: Angles, plan: ForwardPlan, kv: torch.Tensor) -> torch.Tensor:
        """Writes [c | k] of these tokens into `kv`, one layer of the store [1, S, 1, C + E], and attends; [T, H]."""
        kv[0].index_copy_(0, plan.slots_T, self._cached(x_TH, angles.cos_sin))
        q_TND = self._queries(x_TH, angles.cos_sin)
        output_TNC = plan.attention.attend(q_TND, kv, value_dim=self.config.kv_rank)
        return self.out(per_head_product(output_TNC, self.expand_NCV).flatten(1))

    def _cached(self, x_TH: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """[T, 1, C + E]; norm and rotation are computed in fp32 and rounded once."""
        both = self.key_value(x_TH)
        c_TC, k_TE = both.tensor_split((self.config.kv_rank,), dim=-1)
        k_T1E = rotate(k_TE.unsqueeze(1).float(), *cos_sin).to(x_TH.dtype)
        return torch.cat((_rms_norm(c_TC, self.key_value_norm).unsqueeze(1), k_T1E), dim=-1)

    def _queries(self, x_TH: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """Scaled queries in the space of the cached vectors, [T, N, C + E].

        In bf16 an absorbed query is rounded twice: as the output of its product, and once it is scaled, in fp32. The
        rotated part is rotated and scaled in fp32, and rounded after that.
        """
        inputs = x_TH if self.compressed_query is None else self.compressed_query.forward(x_TH)
        heads = self.query(inputs).view(len(x_TH), self.config.num_heads, -1)
        plain_TNP, rotated_TNE = heads.tensor_split((self.config.plain_dim,), dim=-1)
        absorbed_TNC = per_head_product(plain_TNP, self.absorb_NPC).float()
        q_TND = torch.cat((absorbed_TNC, rotate(rotated_TNE.float(), *cos_sin)), dim=-1)
        scale = self.config.scale_factor * (self.config.plain_dim + self.config.rotary_dim) ** -0.5
        return q_TND.mul_(scale).to(x_TH.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computed in fp32, rounded once."""
    return (F.rms_norm(x.float(), weight.shape, None, _EPS) * weight.float()).to(x.dtype)
