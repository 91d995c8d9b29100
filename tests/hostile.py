"""Values that no endpoint may let through to a worker, and what can only be said in raw JSON."""

from typing import Any

from tests.endpoints import CHAT, COMPLETIONS, GENERATE, SGLANG, Endpoint

#: By vLLM's name of the field; the vocabulary has 300 ids, the context 128 tokens, the prompt 1.
HOSTILE: dict[str, list[Any]] = {
    "n": [0, -1, 129, 10**6, 2**63, 1.5, "1", True],
    "seed": [2**63, 2**64, 10**20, -(2**63) - 1, "1", 1.0, True],
    "max_tokens": [0, -1, -160, 1.5, "4", True],
    "min_tokens": [-1, 1.5, "1", True],
    "temperature": [-1, -0.001, "nan", "1", True, [1]],
    "top_p": [0, 1.0001, -0.1, "1", True],
    "top_k": [-2, 2**31, 1.5, "1", True],
    "min_p": [-0.1, 1.1, "0", False],
    "presence_penalty": [3, -3, 2.001, "0", True],
    "frequency_penalty": [3, -3, 2.001, "0", True],
    "repetition_penalty": [0, -1, 2.1, "1", True],
    "logprobs": [21, 300, 301, 10**9, 2**31, "1", 1.5],
    "logit_bias": [
        *({key: 1} for key in ("300", "-1", "AI", "1.0", "", "01", " 1", "٣", "9" * 5000)),
        *({"5": value} for value in (101, -100.5, "x", True, None)),
        [1],
    ],
    "stop": ["", [""], ["a", ""], "a" * 1025, ["a"] * 65, 5, [None]],
    "stop_token_ids": [[300], [-1], [2**70], [1.5], ["1"], [True], [None], 5],
    "ignore_eos": [1, "true"],
    "skip_special_tokens": [1, "true"],
    "include_stop_str_in_output": [1, "yes"],
    "routed_experts_prompt_start": [128, -1, 2**63, 2**127, "3", 1.5, True, [0]],
}

#: Fields of which only some endpoints know.
HOSTILE_OF: dict[Endpoint, dict[str, list[Any]]] = {
    GENERATE: {"prompt_logprobs": [-2, 21, 10**9, "1"], "allowed_token_ids": [[300], ["1"]], "bad_words": [[""], [5]]},
    COMPLETIONS: {"best_of": [0, -1, 2, 129, 10**6], "prompt_logprobs": [-2, 21, "1"], "suffix": ["a"]},
    CHAT: {"max_completion_tokens": [0, -1, -160, 1.5, "4", True], "prompt_logprobs": [-2, 21, "1"]},
    SGLANG: {"regex": ["(", 5], "json_schema": ["{", 5], "ebnf": ["?", 5]},
}

#: What is no number in JSON, or none that a float holds.
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"nan"')

#: Fields that take a number; the last one is a value inside an object.
NUMBERS = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "top_k"),
    *("max_tokens", "n", "routed_experts_prompt_start", "logit_bias.5"),
)

#: Integers that no 64 bits hold, as they stand in a body.
HUGE = ("9223372036854775808", "-9223372036854775809", "1" + 30 * "0", "1" * 4000)

NO_PROMPTS: list[Any] = [
    *([], [300], [-1], [2**31], [2**63], [2**70], [5, 300], [1.5], ["5", 5], [True], [None], [[[5]]], 5, {"0": 1}),
    *([[]], [[5], []], [5, [5]], [[5], 5], "", [""]),
]
"""Prompts that are empty, out of the vocabulary, or of another type, for every endpoint that takes ids."""

NO_MESSAGES: list[Any] = [
    *([], None, "hello", 5, [5], [None], [[]]),
    [{"role": "wizard", "content": "a"}],
    [{"role": 5, "content": "a"}],
    [{"content": "a"}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": {}}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "assistant", "content": None}],
]
"""Messages that no template can render."""
