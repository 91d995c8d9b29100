"""Models for clusters inside the test process: a real checkpoint, or one that takes microseconds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine.grammar import GrammarCompiler
from common.engine.loop import Engine
from common.engine.solo import SoloRunner
from common.errors import InvalidRequestError
from common.kv.store import KVStore
from common.model.batch import Runner
from common.model.decoder import MoeDecoder
from common.model.families import parse_config
from common.model.loader import LoadedModel, load_model
from common.model.numerics import numerics_fingerprint
from common.model.runner import ModelRunner, kv_layout
from common.pb import types_pb2
from common.worker.checkpoints import CheckpointLoader
from common.worker.weights import Load, Weights
from tests.fakes.fake_runner import EOS_TOKEN_ID, VOCAB_SIZE, FakeRunner, fake_store


async def _no_checkpoint(path: Path) -> LoadedModel:
    raise InvalidRequestError(f"{path} cannot be loaded by a model in memory", param="path")


@dataclass(frozen=True)
class Kit:
    """How to make the memory and the runner of one engine, and what the engine says about its model."""

    make_store: Callable[[int], KVStore]
    make_runner: Callable[[KVStore], Runner]
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    path: Path = Path("in memory")
    numerics: str = "this process"
    #: Loads another checkpoint of the same model; a kit without a checkpoint cannot.
    load: Load = _no_checkpoint

    def weights(self, runner: Runner, engine: Engine, *, routing: bool) -> Weights:
        """What a worker of this kit computes with."""

        def use(decoder: MoeDecoder | None, version: str) -> None:
            assert isinstance(runner, ModelRunner)
            runner.use(decoder)
            engine.label_tokens(version)

        engine.label_tokens("0")
        return Weights(self.description(routing=routing), self.path, self.load, use)

    def grammars(self) -> GrammarCompiler:
        """Of the checkpoint's tokenizer, if it has one."""
        tokenizer_json = self.path / "tokenizer.json"
        known = tokenizer_json if tokenizer_json.is_file() else None
        return GrammarCompiler(known, self.vocab_size, self.eos_token_ids)

    def solo(self) -> SoloRunner:
        """The oracle, with blocks for the longest request."""
        block_size = self.make_store(2).layout.block_size
        store = self.make_store(self.max_model_len // block_size + 2)
        return SoloRunner(self.make_runner(store), store, self.eos_token_ids)

    def description(self, *, routing: bool) -> types_pb2.ModelDescription:
        layout, record = self.make_store(2).layout, self.make_store(2).routing
        return types_pb2.ModelDescription(
            family="qwen3_moe",
            fingerprint=self.fingerprint,
            weight_version="0",
            dtype=str(layout.dtype).removeprefix("torch."),
            numerics=self.numerics,
            num_layers=record.num_layers,
            num_experts=record.num_experts,
            top_k=record.top_k,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            block_size=layout.block_size,
            num_kv_planes=layout.num_planes,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            routing_dtype=record.dtype.name,
            routing_enabled=routing,
            eos_token_ids=sorted(self.eos_token_ids),
        )


def fake_kit(*, max_model_len: int = 128, block_size: int = 4) -> Kit:
    """FakeRunner: its answers depend on every byte of KV that it reads back, so stale or foreign bytes show."""
    return Kit(
        make_store=lambda num_blocks: fake_store(num_blocks, block_size),
        make_runner=FakeRunner,
        fingerprint="fake",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
    )


def checkpoint_kit(
    path: Path, dtype: torch.dtype = torch.float32, *, block_size: int = 16, max_model_len: int | None = None
) -> Kit:
    """A checkpoint, loaded once; free blocks hold NaN."""
    config, device = parse_config(path), torch.device("cpu")
    loaded = load_model(path, config, dtype, device, progress=False)
    layout = kv_layout(config, block_size, dtype)
    return Kit(
        make_store=lambda num_blocks: KVStore(layout, config.routing, num_blocks, device, poison=True),
        make_runner=lambda store: ModelRunner(loaded.decoder, store),
        fingerprint=loaded.fingerprint,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        path=path,
        numerics=numerics_fingerprint(device, dtype, loaded.decoder.kernels),
        load=CheckpointLoader(
            config, dtype, device, max_model_len or config.max_position_embeddings, loaded.decoder.kernels
        ).load,
    )
