"""Typed access to the keys of a checkpoint's config.json; every complaint names the file, the key and the value."""

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from common.errors import CheckpointError

#: Far above every size and count that there is, and small enough for any arithmetic with it.
_LARGEST = 2**31 - 1

_MOST_LAYERS, _MOST_EXPERTS, _LARGEST_SIZE = 10_000, 65_536, 2**24

#: Bounds of the counts by which names, sets and tables are sized before any tensor is looked at. They are far above
#: every published model, and what they let through is refused within a moment.
_MOST = {
    "num_hidden_layers": _MOST_LAYERS,
    "num_nextn_predict_layers": _MOST_LAYERS,
    "num_mtp_layers": _MOST_LAYERS,
    "n_routed_experts": _MOST_EXPERTS,
    "num_experts": _MOST_EXPERTS,
    "num_local_experts": _MOST_EXPERTS,
    "n_shared_experts": _MOST_EXPERTS,
    "num_experts_per_tok": _MOST_EXPERTS,
    "num_attention_heads": _LARGEST_SIZE,
    "num_key_value_heads": _LARGEST_SIZE,
    "head_dim": _LARGEST_SIZE,
    "hidden_size": _LARGEST_SIZE,
    "intermediate_size": _LARGEST_SIZE,
    "moe_intermediate_size": _LARGEST_SIZE,
    "shared_expert_intermediate_size": _LARGEST_SIZE,
    "kv_lora_rank": _LARGEST_SIZE,
    "q_lora_rank": _LARGEST_SIZE,
    "qk_nope_head_dim": _LARGEST_SIZE,
    "qk_rope_head_dim": _LARGEST_SIZE,
    "v_head_dim": _LARGEST_SIZE,
    "vocab_size": _LARGEST_SIZE,
}


class ConfigReader:
    """Reads one JSON object. A key that is absent or null takes the default; without a default it is an error. Where
    null means something else, there is a method that says what.

    Where several names are given they are spellings of the same setting, and may not contradict each other.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    def raw(self, *names: str) -> Any:
        """The value under any of these names, or None if all are absent or null.

        Raises:
            CheckpointError: there are two values, and they differ.
        """
        present = [name for name in names if self._values.get(name) is not None]
        if not present:
            return None
        first, *others = present
        for other in others:
            if self._values[other] != self._values[first]:
                self.fail(other, self._values[other], f"what {first} is, {self._values[first]!r}, which means the same")
        return self._values[first]

    def is_null(self, *names: str) -> bool:
        """Whether the key is there and null, under any of these names, and has no value under another."""
        return any(name in self._values for name in names) and self.raw(*names) is None

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive integer, no larger than any that a setting of this name has."""
        value, most = self._present(names, default), _MOST.get(names[0], _LARGEST)
        if type(value) is not int or not 1 <= value <= most:
            self.fail(self._given(names), value, f"a positive integer, at most {most}")
        return value

    def optional_count(self, *names: str, default: int | None) -> int | None:
        """A positive integer, or None where the key is null; an absent key takes the default."""
        return None if self.is_null(*names) else default if self.raw(*names) is None else self.count(*names)

    def count_not_null(self, name: str, *, default: int) -> int:
        """A positive integer; an absent key takes the default, but null is an error."""
        if self.is_null(name):
            self.fail(name, None, "a positive integer")
        return self.count(name, default=default)

    def whole(self, *names: str, default: int | None = None) -> int:
        """An integer that is not negative, and no larger than any that a setting of this name has."""
        value, most = self._present(names, default), _MOST.get(names[0], _LARGEST)
        if type(value) is not int or not 0 <= value <= most:
            self.fail(self._given(names), value, f"an integer, not negative and at most {most}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._present(names, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            self.fail(names[0], value, "a positive number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false; null is false, and an absent key takes the default."""
        value = self._present((name,), default=False if self.is_null(name) else default)
        if type(value) is not bool:
            self.fail(name, value, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        value = self._present(names, default)
        if not isinstance(value, str):
            self.fail(names[0], value, "a string")
        return value

    def integers(self, name: str) -> list[int]:
        """A list of non-negative integers; a single integer is a list of one, an absent key an empty list."""
        value = self.raw(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in values):
            self.fail(name, value, "an integer or a list of integers, none negative")
        return values

    def strings(self, name: str) -> list[str]:
        """A list of strings; an absent key is an empty list."""
        values = self.raw(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            self.fail(name, values, "a list of strings")
        return values

    def section(self, *names: str) -> "ConfigReader":
        """A nested object; an absent one is empty."""
        value = self.raw(*names)
        if value is not None and not isinstance(value, dict):
            self.fail(names[0], value, "an object")
        return ConfigReader(value or {}, f"{self.source}: {names[0]}")

    def fail(self, name: str, value: object, wanted: str) -> NoReturn:
        """Raises CheckpointError for a value that is not what was wanted."""
        raise CheckpointError(f"{self.source}: {name} is {value!r}, but must be {wanted}")

    def _given(self, names: tuple[str, ...]) -> str:
        """The spelling that has a value."""
        return next((name for name in names if self._values.get(name) is not None), names[0])

    def _present(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.raw(*names)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: {' or '.join(names)} is missing")
        return value
