"""Decides about each answer of `moerelay verify`, and keeps what is reported at the end. Sends nothing."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from common.engine.solo import SoloResult
from common.errors import MoerelayError
from common.model.config import ModelConfig
from common.model.families import parse_config
from common.model.hub import resolve_model
from deploy.client import Json
from deploy.verify.answer import Answer, ChoiceAnswer
from deploy.verify.case import Case, CaseLimits
from deploy.verify.compare import compare, fingerprint
from deploy.verify.expected import cut_at_stop, follow_grammar
from deploy.verify.findings import Difference, Findings, count_of
from deploy.verify.options import VerifyOptions
from deploy.verify.solo_oracle import Served, SoloOracle, compile_grammars
from deploy.verify.switches import Switches
from deploy.verify.transformers_oracle import Agreement, TransformersOracle
from deploy.verify.vocabulary import Vocabulary, load_vocabulary


class Oracle(Protocol):
    """Knows what an engine generates for every case; `dtype` is what it computes in."""

    @property
    def dtype(self) -> torch.dtype: ...

    def answer(self, case: Case) -> Sequence[SoloResult]:
        """One run per choice, with rows from `case.rows_from` on. Stop strings are not its business."""
        ...


class Judge:
    """Compares answers with the solo oracle, and with transformers if there is one.

    `vocabulary` is None where the checkpoint has no tokenizer; cases have no texts then.
    """

    def __init__(
        self,
        limits: CaseLimits,
        solo: Oracle,
        transformers: TransformersOracle | None,
        vocabulary: Vocabulary | None,
        *,
        routing: bool = True,
    ) -> None:
        self.limits = limits
        self.routing = routing
        self.findings = Findings()
        self._solo = solo
        self._transformers = transformers
        self._vocabulary = vocabulary
        self._agreement = Agreement()
        self._fingerprints: list[Json] = []

    def add(self, case: Case, outcome: Answer | MoerelayError) -> None:
        """Judges one request. Requests may come in any order, each once."""
        if isinstance(outcome, MoerelayError):
            self._fingerprints.append({"request": case.index, "error": type(outcome).__name__})
            self.findings.add(case.index, [Difference("failed", f"{type(outcome).__name__}: {outcome.message}")])
            return
        self._fingerprints.append(fingerprint(case, outcome))
        solos = [self._seen_by_clients(case, solo) for solo in self._solo.answer(case)]
        self.findings.add(case.index, compare(case, outcome, solos))
        if self._vocabulary is not None:
            for solo in solos:
                self.findings.add(case.index, follow_grammar(case, solo, self._vocabulary))
        if self._transformers is not None:
            for choice in outcome.choices:
                self.findings.add(case.index, self._ask_transformers(self._transformers, case, choice))

    def _seen_by_clients(self, case: Case, solo: SoloResult) -> SoloResult:
        """What the API shows of a solo run."""
        if not (self.routing and case.wire.wants_rows):
            solo = replace(solo, rows_TLK=None)
        return solo if self._vocabulary is None else cut_at_stop(case, solo, self._vocabulary)

    def _ask_transformers(self, oracle: TransformersOracle, case: Case, choice: ChoiceAnswer) -> Iterator[Difference]:
        """bf16 rounds differently in every implementation, so there only the rate says something."""
        if choice.rows_TLK is None or len(choice.rows_TLK) == 0:
            return
        forwarded = [*case.prompt, *choice.token_ids[:-1]]
        agreement, difference = oracle.check(forwarded, case.routing_start, choice.rows_TLK)
        self._agreement += agreement
        if difference is not None and self._solo.dtype == torch.float32:
            yield difference

    def report(self) -> Iterator[str]:
        """One line per kind of difference, then the summary."""
        yield from self.findings.lines()
        if self._transformers is not None:
            yield f"transformers fp32: {self._agreement}"
        if self._vocabulary is None:
            yield "the checkpoint has no tokenizer: no stop strings, bad words or structured outputs were asked for"
        elif not self.limits.grammars:
            yield "the checkpoint's tokenizer follows no grammar: no structured outputs were asked for"
        if not self.routing:
            yield "routing is switched off in the cluster: no rows were compared"
        requests = count_of(len(self._fingerprints), "request")
        yield f"verify: {requests}, {count_of(self.findings.total, 'difference')}"

    def write_dump(self, path: Path) -> None:
        """One JSON line per request, in their order: equal files mean equal bytes."""
        lines = sorted(self._fingerprints, key=lambda line: int(line["request"]))
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def load_judge(options: VerifyOptions, models: Json, cluster: Json, switches: Switches) -> Judge:
    """Loads the checkpoint and checks that it is what the cluster serves. Raises StartupError."""
    path = resolve_model(options.model)
    config = parse_config(path)
    served = Served.of(models, cluster)
    vocabulary = load_vocabulary(path, config.vocab_size)
    matchers = {} if vocabulary is None else compile_grammars(path, config, vocabulary)
    limits = _limits(options, config, served, vocabulary, tuple(matchers), switches)
    solo = SoloOracle.load(path, config, served, limits.max_positions, vocabulary, matchers)
    wants_transformers = options.oracle == "transformers"
    transformers = TransformersOracle.load(path, config) if wants_transformers else None
    return Judge(limits, solo, transformers, vocabulary, routing=switches.routing)


def _limits(
    options: VerifyOptions,
    config: ModelConfig,
    served: Served,
    vocabulary: Vocabulary | None,
    grammars: tuple[str, ...],
    switches: Switches,
) -> CaseLimits:
    return CaseLimits(
        vocab_size=config.vocab_size,
        max_model_len=served.max_model_len,
        max_prompt=options.max_prompt,
        max_output=options.max_output,
        eos_token_ids=config.eos_token_ids,
        pieces=() if vocabulary is None else vocabulary.pieces,
        grammars=grammars,
        processed_logprobs=switches.processed_logprobs,
    )
