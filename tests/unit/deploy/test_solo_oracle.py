"""verify's own model: when it refuses to be an oracle, and that both oracles agree."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.model.families import parse_config
from common.model.kernels.reference import TORCH
from common.model.loader import load_model
from common.model.numerics import numerics_fingerprint
from common.model.synthesize import synthesize
from deploy.verify.case import CaseLimits
from deploy.verify.cases import make_case
from deploy.verify.solo_oracle import Served, SoloOracle
from deploy.verify.transformers_oracle import TransformersOracle

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    # Layer 1 is dense, so that MoE layers and layers are not the same thing.
    synthesize("qwen3_moe", "tiny", 1, {"mlp_only_layers": [1]}, path)
    return path


def load(checkpoint: Path, **changes: Any) -> SoloOracle:
    config = parse_config(checkpoint)
    fingerprint = load_model(checkpoint, config, torch.float32, CPU, progress=False).fingerprint
    described = {"numerics": numerics_fingerprint(CPU, torch.float32, TORCH), "fingerprint": fingerprint, **changes}
    return SoloOracle.load(checkpoint, config, Served(max_model_len=128, **described), num_positions=128)


def test_the_dtype_is_the_clusters(checkpoint: Path) -> None:
    assert load(checkpoint).dtype == torch.float32
    assert load(checkpoint, numerics=numerics_fingerprint(CPU, torch.bfloat16, TORCH)).dtype == torch.bfloat16


def test_other_arithmetic_is_refused_with_both_descriptions(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"the cluster has \[device=other\], here there is \[device=cpu"):
        load(checkpoint, numerics="device=other")


def test_other_weights_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="the cluster serves other weights"):
        load(checkpoint, fingerprint="0" * 32)


def test_transformers_agrees_with_the_solo_run(checkpoint: Path) -> None:
    config = parse_config(checkpoint)
    solo, reference = load(checkpoint), TransformersOracle.load(checkpoint, config)
    limits = CaseLimits(config.vocab_size, 128, max_prompt=100, max_output=16, eos_token_ids=config.eos_token_ids)
    num_sets = 0
    for index in range(4):
        case = make_case(0, index, limits)
        result = solo.answer(case)[0]
        rows_TLK = result.rows_TLK
        assert rows_TLK is not None
        forwarded = [*case.prompt, *(token.token_id for token in result.tokens[:-1])]
        agreement, difference = reference.check(forwarded, case.routing_start, rows_TLK)
        assert difference is None
        num_sets += agreement.num_sets
        if len(rows_TLK):
            rows_TLK[-1, -1] = (rows_TLK[-1, -1] + 1) % config.num_experts
            _, difference = reference.check(forwarded, case.routing_start, rows_TLK)
            assert difference is not None
    assert num_sets > 100


@pytest.mark.parametrize("workers", [[], [("a", "f", "0"), ("b", "f", "0")], [("a", "f", "0"), ("a", "f", "1")]])
def test_a_cluster_without_one_kind_of_healthy_workers_is_refused(workers: list[tuple[str, str, str]]) -> None:
    views: list[dict[str, str | None]] = [
        {"state": "healthy", "numerics": numerics, "fingerprint": fingerprint, "weight_version": version}
        for numerics, fingerprint, version in workers
    ]
    views.append({"state": "dead", "numerics": None, "fingerprint": None})
    with pytest.raises(ConfigError, match="no healthy workers of one kind"):
        Served.of({"data": [{"max_model_len": 128}]}, {"workers": views})
