"""Which dtypes are computed. Imports no torch, so that a wrong one is refused before anything heavy loads."""

from common.errors import ConfigError
from common.model.config import ModelConfig

#: Those of --dtype, and the bytes of a value.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def dtype_name(name: str, config: ModelConfig) -> str:
    """What --dtype stands for: "auto" is what the checkpoint declares. Raises ConfigError."""
    declared = config.dtype if name == "auto" else name
    if declared not in DTYPE_BYTES:
        raise ConfigError(
            f"the checkpoint declares dtype {declared}, which is not computed here; "
            f"choose --dtype {' or '.join(DTYPE_BYTES)}",
            param="dtype",
        )
    return declared
