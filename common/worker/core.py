"""Puts one worker's model, memory and engine together from its settings."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
import torch

from common.config import WorkerSettings
from common.engine.grammar import GrammarCompiler
from common.engine.limits import EngineLimits
from common.engine.loop import Engine
from common.engine.objectives import Objectives
from common.errors import ConfigError
from common.kv.pool import BlockPool
from common.kv.store import KVLayout, KVStore
from common.model.batch import Runner
from common.model.config import ModelConfig
from common.model.decoder import MoeDecoder
from common.model.kernels.choice import choose_kernels
from common.model.loader import LoadedModel, load_model, room_for_weights
from common.model.numerics import is_exact, numerics_fingerprint, resolve_device, resolve_dtype
from common.model.runner import ModelRunner, kv_layout
from common.pb import types_pb2
from common.tracing import TRACING_OFF, Tracing
from common.worker.bridge import EngineBridge
from common.worker.checkpoints import CheckpointLoader
from common.worker.context import blocks_and_context
from common.worker.machine import WorkerCores, give_back_memory, keep_what_is_there, worker_cores
from common.worker.spans import RequestSpans
from common.worker.weights import Weights

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerCore:
    """Everything behind the RPC services of one worker."""

    weights: Weights
    cores: WorkerCores
    exact: bool
    store: KVStore
    engine: Engine
    bridge: EngineBridge
    grammars: GrammarCompiler
    #: Computes in another store with the weights in use; on the engine thread, between steps.
    make_solo_runner: Callable[[KVStore], Runner]
    spans: RequestSpans = field(default_factory=RequestSpans)

    @property
    def description(self) -> types_pb2.ModelDescription:
        """The model with the weights in use; another object after each weight update."""
        return self.weights.description

    async def engine_ended(self) -> None:
        """Returns when the engine thread has ended, by `Engine.stop` or by a fault."""
        await asyncio.to_thread(self.engine.join)


def build_core(
    settings: WorkerSettings,
    path: Path,
    config: ModelConfig,
    *,
    swap_space_bytes: int = 0,
    tracing: Tracing = TRACING_OFF,
) -> WorkerCore:
    """Loads the checkpoint and assembles the engine; the engine thread is not started yet.

    `swap_space_bytes`: host memory for sequences that are preempted, where some are.

    Raises:
        StartupError: a setting does not fit the checkpoint, or the checkpoint is broken.
    """
    cores = worker_cores(settings)
    torch.set_num_threads(cores.threads)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, config)
    layout = kv_layout(config, settings.block_size, dtype)
    num_blocks, max_model_len = blocks_and_context(settings, config, dtype.itemsize)
    kernels = choose_kernels(settings.kernels, device, config)
    log.info("kernels_chosen", kernels=kernels.name)
    with room_for_weights(path):
        loaded = load_model(path, config, dtype, device, progress=True, max_positions=max_model_len, kernels=kernels)
    give_back_memory()
    keep_what_is_there()
    store = _allocate(layout, config, num_blocks, device, poison=settings.debug_poison_kv)
    bridge = EngineBridge()
    runner = ModelRunner(loaded.decoder, store)
    engine = Engine(
        runner=runner,
        store=store,
        pool=BlockPool(num_blocks + 1),
        limits=EngineLimits(
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_waiting=settings.max_waiting,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            swap_space_bytes=swap_space_bytes,
            exact=is_exact(device),
            objectives=Objectives(settings.slo_ttft, settings.slo_itl),
            max_mixed_prefill_tokens=settings.max_mixed_prefill_tokens,
            max_contended_step_s=settings.max_contended_step,
        ),
        eos_token_ids=config.eos_token_ids,
        on_events=bridge.deliver,
        prefix_caching=settings.enable_prefix_caching,
    )
    bridge.attach(engine)
    description = _describe(settings, config, loaded, max_model_len, numerics_fingerprint(device, dtype, kernels))
    loader = CheckpointLoader(config, dtype, device, max_model_len, kernels)
    weights = Weights(description, path, loader.load, partial(_use, runner, engine))
    engine.label_tokens(settings.weight_version)
    grammars = _grammars(path, config)
    spans = RequestSpans(tracing)
    return WorkerCore(weights, cores, is_exact(device), store, engine, bridge, grammars, runner.beside, spans)


def _grammars(path: Path, config: ModelConfig) -> GrammarCompiler:
    tokenizer_json = path / "tokenizer.json"
    return GrammarCompiler(
        tokenizer_json if tokenizer_json.is_file() else None, config.vocab_size, config.eos_token_ids
    )


def _use(runner: ModelRunner, engine: Engine, decoder: MoeDecoder | None, version: str) -> None:
    """Puts weights to use; on the engine thread, between steps."""
    runner.use(decoder)
    engine.label_tokens(version)


def _allocate(layout: KVLayout, config: ModelConfig, num_blocks: int, device: torch.device, *, poison: bool) -> KVStore:
    try:
        return KVStore(layout, config.routing, num_blocks + 1, device, poison=poison)
    except (RuntimeError, MemoryError) as error:  # torch's and NumPy's ways to say that memory is out
        wanted = num_blocks * layout.block_size * (layout.token_bytes + config.routing.row_bytes)
        raise ConfigError(
            f"there is no room for a KV cache of {wanted / 2**30:.1f} GiB on {device}; "
            "lower --kv-cache-memory or --num-kv-blocks"
        ) from error


def _describe(
    settings: WorkerSettings, config: ModelConfig, loaded: LoadedModel, max_model_len: int, numerics: str
) -> types_pb2.ModelDescription:
    dtype = loaded.decoder.dtype
    return types_pb2.ModelDescription(
        family=config.family,
        fingerprint=loaded.fingerprint,
        weight_version=settings.weight_version,
        dtype=str(dtype).removeprefix("torch."),
        numerics=numerics,
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        top_k=config.top_k,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        num_kv_planes=config.num_kv_planes,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.kv_dim,
        routing_dtype=config.routing.dtype.name,
        routing_enabled=settings.enable_return_routed_experts,
        eos_token_ids=sorted(config.eos_token_ids),
    )
