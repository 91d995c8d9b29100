"""Refuses a config.json that names another way of routing than its family's. Imports no torch.

Checkpoints of every family may carry these keys; a router that differs from what they say would choose other experts
without anything else going wrong.
"""

from common.model.config import ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader


def check_routing(config: ModelConfig, reader: ConfigReader) -> None:
    """Raises CheckpointError if `scoring_func` or `topk_method` is not what `config.router` does."""
    scoring = "sigmoid" if config.router.scoring == "sigmoid" else "softmax"
    if reader.raw("scoring_func") not in (None, scoring):
        reader.fail("scoring_func", reader.raw("scoring_func"), f"{scoring!r} in {config.family}")
    methods = _methods(config.router, reader)
    if reader.raw("topk_method") not in (None, *methods):
        reader.fail("topk_method", reader.raw("topk_method"), f"{methods[0]!r} in {config.family}")


def _methods(router: RouterConfig, reader: ConfigReader) -> tuple[str, ...]:
    """DeepSeek's names for how experts are chosen. With one group the two ways are the same."""
    if router.correction_bias:
        return ("noaux_tc",)
    if router.num_groups > 1:
        return ("group_limited_greedy",)
    # The key itself counts, because families without groups do not read it.
    return ("greedy", "group_limited_greedy") if reader.raw("n_group") == 1 else ("greedy",)
