"""The solo oracle of `moerelay verify`: the cluster's checkpoint and arithmetic in this process, request by request."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from common.engine.solo import SoloResult, SoloRunner
from common.errors import ConfigError
from common.kv.store import KVLayout, KVStore
from common.model.config import ModelConfig
from common.model.loader import load_model
from common.model.numerics import numerics_fingerprint
from common.model.runner import ModelRunner
from common.process import num_cores
from deploy.client import Json
from deploy.verify.cases import Case

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Served:
    """What the cluster says about itself."""

    max_model_len: int
    numerics: str
    fingerprint: str

    @classmethod
    def of(cls, models: Json, cluster: Json) -> Self:
        """From /v1/models and /cluster. Raises ConfigError when the workers are not one kind."""
        kinds = {(w["numerics"], w["fingerprint"]) for w in cluster["workers"] if w["state"] == "healthy"}
        max_model_len = models["data"][0]["max_model_len"]
        if len(kinds) != 1 or max_model_len is None:
            raise ConfigError(f"the cluster has no healthy workers of one kind, but {len(kinds)} kinds; see /cluster")
        [(numerics, fingerprint)] = kinds
        return cls(max_model_len, numerics, fingerprint)


class SoloOracle:
    """Answers as a solo run does."""

    def __init__(self, runner: SoloRunner, dtype: torch.dtype) -> None:
        self._runner = runner
        self.dtype = dtype

    @classmethod
    def load(cls, path: Path, config: ModelConfig, served: Served, num_positions: int) -> Self:
        """Loads the checkpoint for sequences of up to `num_positions` tokens.

        Raises:
            ConfigError: this process cannot compute as the cluster does, or the cluster serves other weights.
            CheckpointError: the checkpoint is broken.
        """
        # The other half is the cluster's, if it runs here. Threads that wait for one another on busy cores are slow.
        torch.set_num_threads(max(1, num_cores() // 2))
        device, dtype = _same_arithmetic(served.numerics)
        loaded = load_model(path, config, dtype, device, progress=True, max_positions=num_positions)
        if loaded.fingerprint != served.fingerprint:
            raise ConfigError(
                f"the cluster serves other weights (fingerprint {served.fingerprint}) than {path} holds "
                f"({loaded.fingerprint}); name its checkpoint with --model"
            )
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, _BLOCK_SIZE, dtype)
        num_blocks = -(-num_positions // _BLOCK_SIZE) + 1  # one more for the null block
        store = KVStore(layout, config.routing, num_blocks, device)
        return cls(SoloRunner(ModelRunner(loaded.decoder, store), store, config.eos_token_ids), dtype)

    def answer(self, case: Case) -> SoloResult:
        return self._runner.run(case.prompt, case.sampling, case.routing_start)


def _same_arithmetic(numerics: str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that give the cluster's numerics fingerprint. Raises ConfigError if none here does."""
    devices = [torch.device(name) for name in ("cpu", "cuda") if name == "cpu" or torch.cuda.is_available()]
    mine = [(device, dtype) for device in devices for dtype in (torch.float32, torch.bfloat16)]
    for device, dtype in mine:
        if numerics_fingerprint(device, dtype) == numerics:
            return device, dtype
    here = "; ".join(numerics_fingerprint(device, dtype) for device, dtype in mine)
    raise ConfigError(
        f"this machine computes other bits than the cluster, so a solo run here proves nothing: "
        f"the cluster has [{numerics}], here there is [{here}]; run verify on a machine like the workers'"
    )
