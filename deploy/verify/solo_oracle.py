"""The solo oracle of `moerelay verify`: the cluster's checkpoint and arithmetic in this process, request by request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from common.cores import num_cores
from common.engine.grammar import GrammarCompiler, GrammarMatcher
from common.engine.solo import SoloResult, SoloRunner
from common.errors import ConfigError, InvalidRequestError
from common.kv.store import KVStore
from common.model.config import ModelConfig
from common.model.kernels.choice import available_kernels
from common.model.kernels.interface import Kernels
from common.model.loader import load_model, room_for_weights
from common.model.numerics import numerics_fingerprint
from common.model.runner import ModelRunner, kv_layout
from deploy.client import Json
from deploy.verify.case import Case
from deploy.verify.grammars import ALPHABET, GRAMMARS
from deploy.verify.vocabulary import Vocabulary
from router.text.tokenizer import TOKENIZER_FILE

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Served:
    """What the cluster says about itself."""

    max_model_len: int
    numerics: str
    fingerprint: str
    weight_version: str = ""

    @classmethod
    def of(cls, models: Json, cluster: Json) -> Self:
        """From /v1/models and /cluster. Raises ConfigError when the workers are not one kind."""
        healthy = [worker for worker in cluster["workers"] if worker["state"] == "healthy"]
        kinds = {(w["numerics"], w["fingerprint"], w["weight_version"]) for w in healthy}
        max_model_len = models["data"][0]["max_model_len"]
        if len(kinds) != 1 or max_model_len is None:
            raise ConfigError(f"the cluster has no healthy workers of one kind, but {len(kinds)} kinds; see /cluster")
        [kind] = kinds
        return cls(max_model_len, *kind)


class SoloOracle:
    """Answers as solo runs do, one per choice."""

    def __init__(
        self,
        runner: SoloRunner,
        dtype: torch.dtype,
        vocabulary: Vocabulary | None = None,
        matchers: Mapping[str, GrammarMatcher] | None = None,
    ) -> None:
        """`vocabulary` and `matchers` (by name of grammar) may be left out if no case needs them."""
        self._runner = runner
        self._vocabulary = vocabulary
        self._matchers = matchers or {}
        self.dtype = dtype

    @classmethod
    def load(
        cls,
        path: Path,
        config: ModelConfig,
        served: Served,
        num_positions: int,
        vocabulary: Vocabulary | None = None,
        matchers: Mapping[str, GrammarMatcher] | None = None,
    ) -> Self:
        """Loads the checkpoint for sequences of up to `num_positions` tokens.

        Raises:
            ConfigError: this process cannot compute as the cluster does, or the cluster serves other weights.
            CheckpointError: the checkpoint is broken.
        """
        solo, dtype = load_solo(path, config, served, num_positions)
        return cls(solo, dtype, vocabulary, matchers)

    def answer(self, case: Case) -> Sequence[SoloResult]:
        """Runs all choices, one after the other."""
        sampling, matcher = case.sampling, None
        if case.text.bad_words:
            assert self._vocabulary is not None, "bad words are asked for with a tokenizer only"
            sampling = replace(sampling, bad_words=self._vocabulary.bad_words(case.text.bad_words))
        if case.text.grammar is not None:
            sampling = replace(sampling, grammar=GRAMMARS[case.text.grammar].compiled)
            matcher = self._matchers[case.text.grammar]
        return [
            self._runner.run(case.prompt, sampling, case.rows_from, choice=choice, matcher=matcher)
            for choice in range(sampling.n)
        ]


def load_solo(path: Path, config: ModelConfig, served: Served, num_positions: int) -> tuple[SoloRunner, torch.dtype]:
    """A solo runner with the cluster's weights and arithmetic, for sequences of up to `num_positions` tokens.

    Raises:
        ConfigError: this process cannot compute as the cluster does, or the cluster serves other weights.
        CheckpointError: the checkpoint is broken.
    """
    # The other half is the cluster's, if it runs here. Threads that wait for one another on busy cores are slow.
    torch.set_num_threads(max(1, num_cores() // 2))
    device, dtype, kernels = _same_arithmetic(served.numerics, config)
    with room_for_weights(path):
        loaded = load_model(
            path, config, dtype, device, progress=True, max_positions=served.max_model_len, kernels=kernels
        )
    if loaded.fingerprint != served.fingerprint:
        raise ConfigError(
            f"the cluster serves other weights (fingerprint {served.fingerprint}) than {path} holds "
            f"({loaded.fingerprint}); name its checkpoint with --model"
        )
    layout = kv_layout(config, _BLOCK_SIZE, dtype)
    num_blocks = -(-num_positions // _BLOCK_SIZE) + 1  # one more for the null block
    store = KVStore(layout, config.routing, num_blocks, device)
    runner = ModelRunner(loaded.decoder, store)
    return SoloRunner(runner, store, config.eos_token_ids, weight_version=served.weight_version), dtype


def compile_grammars(path: Path, config: ModelConfig, vocabulary: Vocabulary) -> dict[str, GrammarMatcher]:
    """All grammars by name; none if the checkpoint's tokenizer cannot spell them, or no token can end an output."""
    letters = {text for _, text in vocabulary.pieces}
    if not (letters >= ALPHABET and any(i < config.vocab_size for i in config.eos_token_ids)):
        return {}
    compiler = GrammarCompiler(path / TOKENIZER_FILE, config.vocab_size, config.eos_token_ids)
    try:
        return {name: compiler.compile(grammar.compiled) for name, grammar in GRAMMARS.items()}
    except InvalidRequestError:
        return {}  # a tokenizer of a kind that llguidance does not know; the report says that none were asked for


def _same_arithmetic(numerics: str, config: ModelConfig) -> tuple[torch.device, torch.dtype, Kernels]:
    """What gives the cluster's numerics fingerprint. Raises ConfigError if nothing here does."""
    devices = [torch.device(name) for name in ("cpu", "cuda") if name == "cpu" or torch.cuda.is_available()]
    seen = []
    for device in devices:
        for kernels in available_kernels(device, config):
            for dtype in (torch.float32, torch.bfloat16):
                seen.append(numerics_fingerprint(device, dtype, kernels))
                if seen[-1] == numerics:
                    return device, dtype, kernels
    here = "; ".join(seen)
    raise ConfigError(
        f"this machine computes other bits than the cluster, so a solo run here proves nothing: "
        f"the cluster has [{numerics}], here there is [{here}]; run this on a machine like the workers'"
    )
