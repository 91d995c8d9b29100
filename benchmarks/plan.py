"""Which stages a run has, in which order, under which conditions."""

import argparse
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.stages.conditions import Condition, Servers, ServerSpec, aggregated, disaggregated, vllm
from benchmarks.stages.conversation import ConversationStage
from benchmarks.stages.handoff_latency import HandoffLatencyStage
from benchmarks.stages.idle import IdleStage
from benchmarks.stages.memory import POOL_FLAG, MemoryStage, weight_bytes
from benchmarks.stages.mixed import MixedStage
from benchmarks.stages.names import (
    AGGREGATED,
    AGGREGATED_OFF,
    DISAGGREGATED,
    PEER,
    PEER_CHUNKED,
    PEER_CHUNKED_SERVER,
)
from benchmarks.stages.parts import PartStage, read_exactness, read_handoff, read_router
from benchmarks.stages.serving import ServingStage
from benchmarks.stages.stage import Stage
from benchmarks.stages.startup import StartupStage

#: In the order in which they run: those with one server at a time, those with all of them up, those without servers.
STAGES = (
    "startup",
    "memory",
    "idle",
    "serving",
    "rows",
    "conversation",
    "handoff latency",
    "mixed",
    "handoff",
    "router",
    "exactness",
)
#: For everything that a run makes; git ignores it.
DIRECTORY = ROOT / ".bench"
NUM_TURNS = 100
#: Of the quiet and of the mixed phase: four long prompts.
PHASE_S = 16.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is asked to do. `vllm`: the peer's environment; None: without it."""

    repetitions: int
    only: tuple[str, ...] | None
    directory: Path
    model: Path
    vllm: Path | None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Options":
        """Raises SystemExit if the repetitions are none."""
        directory: Path = arguments.directory.absolute()
        if arguments.repetitions < 1:
            raise SystemExit(f"--repetitions must be at least 1, got {arguments.repetitions}")
        return cls(
            repetitions=arguments.repetitions,
            only=tuple(arguments.only) if arguments.only else None,
            directory=directory,
            model=arguments.model.absolute(),
            vllm=None if arguments.without_peer else (arguments.vllm or directory / "vllm").absolute(),
        )

    @property
    def num_turns(self) -> int:
        """Of a conversation."""
        return NUM_TURNS

    @property
    def journal(self) -> Path:
        """Of runs with these options: one of a single stage leaves that of everything alone."""
        return self.directory / f"journal-{hashlib.sha256(str(self).encode()).hexdigest()[:12]}.jsonl"

    @property
    def is_complete(self) -> bool:
        """Whether everything is measured that the documentation shows."""
        return self.only is None and self.vllm is not None

    def rounds(self, share: float) -> int:
        """So many times the rounds of the serving stage, at least one."""
        return max(1, round(share * self.repetitions))


def checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """`--model`, by default what BENCH_MODEL says, else a place of our own."""
    parser.add_argument(
        "--model",
        type=Path,
        default=path_from_env("BENCH_MODEL") or DIRECTORY / "model",
        help="a checkpoint of the bench preset, written if it is not there (default: BENCH_MODEL, or %(default)s)",
    )


def path_from_env(name: str) -> Path | None:
    """What a variable of the environment says."""
    value = os.environ.get(name)
    return Path(value) if value else None


def plan(options: Options, servers: Servers) -> Iterator[Stage]:
    """The stages that are wanted."""
    for stage in _every_stage(options, servers):
        if options.only is None or stage.name in options.only:
            yield stage


def _every_stage(options: Options, servers: Servers) -> Iterator[Stage]:
    yield from _one_server_at_a_time(options)
    yield from _all_servers_up(options, servers)
    yield from _parts(options)


def _peers(options: Options) -> list[ServerSpec]:
    return [vllm(options.vllm, options.model)] if options.vllm else []


def _one_server_at_a_time(options: Options) -> Iterator[Stage]:
    model, logs = options.model, options.directory / "logs"
    specs = [*_peers(options), aggregated(model), disaggregated(model)]
    yield StartupStage(specs, options.rounds(0.6), logs)
    small = [aggregated(model, POOL_FLAG), disaggregated(model, POOL_FLAG)]
    yield MemoryStage(small, 1, weight_bytes(model), logs)


def _all_servers_up(options: Options, servers: Servers) -> Iterator[Stage]:
    both, split = aggregated(options.model), disaggregated(options.model)
    theirs = [Condition(PEER, spec) for spec in _peers(options)]
    on = Condition(AGGREGATED, both)
    off = Condition(AGGREGATED_OFF, both, {"return_routed_experts": False})
    disaggregated_on = Condition(DISAGGREGATED, split)
    conditions = [*theirs, on, off, disaggregated_on]
    yield IdleStage(servers, conditions)
    yield ServingStage("serving", servers, conditions, options.repetitions)
    yield ServingStage("rows", servers, [off, on], options.rounds(2))
    yield ConversationStage(servers, on, options.rounds(0.4), options.num_turns)
    yield HandoffLatencyStage(servers, disaggregated_on, options.rounds(0.6))
    yield MixedStage(servers, [*theirs, *_chunked(options), on, disaggregated_on], options.rounds(0.6), PHASE_S)


def _chunked(options: Options) -> list[Condition]:
    """The peer with short steps, which is what its users do against long gaps."""
    if options.vllm is None:
        return []
    spec = vllm(options.vllm, options.model, "--max-num-batched-tokens", "256", name=PEER_CHUNKED_SERVER)
    return [Condition(PEER_CHUNKED, spec)]


def _parts(options: Options) -> Iterator[Stage]:
    yield PartStage("handoff", "benchmarks.handoff", [f"--repetitions={options.rounds(3)}"], 1, read_handoff)
    yield PartStage("router", "benchmarks.router", [f"--repetitions={options.rounds(0.6)}"], 1, read_router)
    exactness = [f"--model={options.model}", f"--repetitions={options.rounds(2)}"]
    yield PartStage("exactness", "benchmarks.exactness", exactness, 1, read_exactness)
