"""Decides about each answer of `moerelay verify`, and keeps what is reported at the end. Sends nothing."""

import json
from collections.abc import Iterator
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
from deploy.verify.answer import Answer
from deploy.verify.cases import Case, CaseLimits
from deploy.verify.compare import compare, fingerprint
from deploy.verify.findings import Difference, Findings, count_of
from deploy.verify.options import VerifyOptions
from deploy.verify.solo_oracle import Served, SoloOracle
from deploy.verify.transformers_oracle import Agreement, TransformersOracle


class Oracle(Protocol):
    """Knows the answer to every case; `dtype` is what it computes in."""

    @property
    def dtype(self) -> torch.dtype: ...

    def answer(self, case: Case) -> SoloResult: ...


class Judge:
    """Compares answers with the solo oracle, and with transformers if there is one.

    `routing` is false where the cluster's routing is switched off: then every answer must be without rows.
    """

    def __init__(
        self, limits: CaseLimits, solo: Oracle, transformers: TransformersOracle | None, *, routing: bool = True
    ) -> None:
        self.limits = limits
        self.routing = routing
        self.findings = Findings()
        self._solo = solo
        self._transformers = transformers
        self._agreement = Agreement()
        self._fingerprints: list[Json] = []

    def add(self, case: Case, outcome: Answer | MoerelayError) -> None:
        """Judges one request. Requests may come in any order, each once."""
        if isinstance(outcome, MoerelayError):
            self._fingerprints.append({"request": case.index, "error": type(outcome).__name__})
            self.findings.add(case.index, [Difference("failed", f"{type(outcome).__name__}: {outcome.message}")])
            return
        self._fingerprints.append(fingerprint(case, outcome))
        solo = self._solo.answer(case)
        expected = solo if self.routing else replace(solo, rows_TLK=None)
        self.findings.add(case.index, compare(case, outcome, expected))
        if self._transformers is not None:
            self.findings.add(case.index, self._ask_transformers(self._transformers, case, outcome))

    def _ask_transformers(self, oracle: TransformersOracle, case: Case, answer: Answer) -> Iterator[Difference]:
        """bf16 rounds differently in every implementation, so there only the rate says something."""
        if answer.rows_TLK is None or len(answer.rows_TLK) == 0:
            return
        forwarded = [*case.prompt, *answer.token_ids[:-1]]
        agreement, difference = oracle.check(forwarded, case.routing_start, answer.rows_TLK)
        self._agreement += agreement
        if difference is not None and self._solo.dtype == torch.float32:
            yield difference

    def report(self) -> Iterator[str]:
        """One line per kind of difference, then the summary."""
        yield from self.findings.lines()
        if self._transformers is not None:
            yield f"transformers fp32: {self._agreement}"
        if not self.routing:
            yield "routing is switched off in the cluster: no rows were compared"
        requests = count_of(len(self._fingerprints), "request")
        yield f"verify: {requests}, {count_of(self.findings.total, 'difference')}"

    def write_dump(self, path: Path) -> None:
        """One JSON line per request, in their order: equal files mean equal bytes."""
        lines = sorted(self._fingerprints, key=lambda line: int(line["request"]))
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def load_judge(options: VerifyOptions, models: Json, cluster: Json, *, routing: bool) -> Judge:
    """Loads the checkpoint and checks that it is what the cluster serves. Raises StartupError."""
    path = resolve_model(options.model)
    config = parse_config(path)
    served = Served.of(models, cluster)
    limits = _limits(options, config, served)
    num_positions = min(served.max_model_len, options.max_prompt + options.max_output)
    solo = SoloOracle.load(path, config, served, num_positions)
    wants_transformers = options.oracle == "transformers"
    transformers = TransformersOracle.load(path, sorted(config.moe_layers)) if wants_transformers else None
    return Judge(limits, solo, transformers, routing=routing)


def _limits(options: VerifyOptions, config: ModelConfig, served: Served) -> CaseLimits:
    return CaseLimits(
        vocab_size=config.vocab_size,
        max_model_len=served.max_model_len,
        max_prompt=options.max_prompt,
        max_output=options.max_output,
        eos_token_ids=config.eos_token_ids,
    )
