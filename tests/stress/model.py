"""A tiny checkpoint of one family in memory, twice: with two sets of weights, so that they can be swapped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine.grammar import GrammarCompiler, GrammarMatcher
from common.engine.limits import EngineLimits
from common.kv.store import KVStore
from common.model.config import ModelConfig
from common.model.decoder import MoeDecoder
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.runner import ModelRunner, kv_layout
from common.model.synthesize import synthesize
from tests.unit.engine.rig import CoreRig

#: 2 layers, so that a step takes a few milliseconds; with a window of 8 in gpt_oss and of 64 in qwen2_moe, which
#: prompts outgrow.
SIZES: dict[str, object] = {"num_hidden_layers": 2, "max_position_embeddings": 512}

#: What the grammar of those requests that have one allows.
GRAMMAR = "start: /[a-z]{1,3}( [a-z]+){2,9}/"


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What may differ between two engines of one cluster, and what a random run draws."""

    #: Beside the null block.
    num_blocks: int
    #: Tokens per step.
    budget: int
    seats: int
    swap_space_bytes: int
    prefix_caching: bool = True
    max_contended_step_s: float | None = None


class StressModel:
    """Two decoders of one shape. Version 0, 2, 4 … of the weights are the first one's, 1, 3, 5 … the second one's."""

    def __init__(self, family: str, dtype: torch.dtype, directory: Path) -> None:
        """Makes the checkpoints in `directory`, unless they are there."""
        paths = [directory / f"{family}-{seed}" for seed in (1, 2)]
        for seed, path in enumerate(paths, start=1):
            if not path.exists():
                synthesize(family, "tiny", seed, SIZES, path)
        self.name = f"{family}-{str(dtype).removeprefix('torch.')}"
        self.config: ModelConfig = parse_config(paths[0])
        self.decoders: tuple[MoeDecoder, ...] = tuple(
            load_model(path, parse_config(path), dtype, torch.device("cpu"), progress=False).decoder for path in paths
        )
        compiler = GrammarCompiler(paths[0] / "tokenizer.json", self.config.vocab_size, self.config.eos_token_ids)
        self.matcher: GrammarMatcher = compiler.compile(GRAMMAR)

    def decoder(self, version: int) -> MoeDecoder:
        """That of the version."""
        return self.decoders[version % 2]

    def store(self, num_blocks: int, block_size: int) -> KVStore:
        """One whose freed blocks are ruined; `num_blocks` counts the null block too."""
        layout = kv_layout(self.config, block_size, self.decoders[0].dtype)
        return KVStore(layout, self.config.routing, num_blocks, torch.device("cpu"), poison=True)

    def position_bytes(self) -> int:
        """KV and row of one position: the unit of the swap space."""
        store = self.store(2, 1)
        return store.layout.token_bytes + store.routing.row_bytes


class ModelRig(CoreRig):
    """One engine core on such a model."""

    def __init__(self, model: StressModel, shape: EngineShape, block_size: int) -> None:
        store = model.store(shape.num_blocks + 1, block_size)
        bounds = EngineLimits(
            shape.budget,
            shape.seats,
            max_waiting=1000,
            max_model_len=model.config.max_position_embeddings,
            vocab_size=model.config.vocab_size,
            swap_space_bytes=shape.swap_space_bytes,
            max_contended_step_s=shape.max_contended_step_s,
        )
        self.runner = ModelRunner(model.decoder(0), store)
        super().__init__(self.runner, store, bounds, model.config.eos_token_ids, prefix_caching=shape.prefix_caching)

    def use(self, decoder: MoeDecoder, label: str) -> None:
        """Other weights, between two steps."""
        self.runner.use(decoder)
        self.core.weight_version = label


def label_of(version: int) -> str:
    """As tokens carry it."""
    return str(version or "")


def version_of(label: str) -> int:
    """The other way round."""
    return int(label or 0)


def all_models(families: Sequence[str], directory: Path) -> list[StressModel]:
    """Every family in fp32 and in bf16."""
    return [StressModel(family, dtype, directory) for family in families for dtype in (torch.float32, torch.bfloat16)]
