"""Grammars over a byte-level tokenizer: whatever is drawn, the text is a word of the grammar, and only that ends it."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from common.engine.grammar import GrammarCompiler, GrammarMatcher
from common.engine.sampler import SampleSpec, sample
from common.errors import InvalidRequestError
from common.model.tokenizer_training import EOS_ID, PAD_ID, train_tokenizer
from common.sampling import SampledToken, SamplingParams

#: The model's vocabulary is larger than the tokenizer's, as is common; one end-of-sequence id is beyond the latter.
TOKENIZER_SIZE, VOCAB, SURPLUS_EOS = 300, 330, 320
EOS = frozenset({EOS_ID, SURPLUS_EOS})

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{3}-[0-9]+"
CHOICES = ["yes", "yesterday", "naïve"]

GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(SCHEMA),
    "regex": LLMatcher.grammar_from_regex(REGEX),
    "choice": LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in CHOICES)),
}


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TOKENIZER_SIZE).save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_json: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_json))


@pytest.fixture(scope="module")
def compiler(tokenizer_json: Path) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json, VOCAB, EOS)


def is_word(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "choice":
        return text in CHOICES
    value = json.loads(text)
    return set(value) == {"name", "ok"} and len(value["name"]) <= 5 and isinstance(value["ok"], bool)


def allowed(matcher: GrammarMatcher) -> set[int]:
    return set(np.flatnonzero(matcher.allowed()).tolist())


def feed(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> None:
    for byte in text.encode():
        [token_id] = tokenizer.encode(bytes([byte]).decode()).ids
        matcher.accept(token_id)


def write(matcher: GrammarMatcher, seed: int, max_tokens: int = 200) -> list[int]:
    """A random text that follows the grammar, and the id that ended it."""
    history: list[int] = [1]
    random = np.random.default_rng(seed)
    while history[-1] not in EOS and len(history) < max_tokens:
        logits_1V = torch.from_numpy(random.standard_normal((1, VOCAB), np.float32))
        spec = SampleSpec.of(
            SamplingParams(max_tokens, seed=seed), EOS, token_ids=history, num_prompt=1, matcher=matcher
        )
        [token] = sample(logits_1V, [spec])
        assert isinstance(token, SampledToken)
        matcher.accept(token.token_id)
        history.append(token.token_id)
    return history[1:]


@pytest.mark.parametrize("kind", GRAMMARS)
def test_whatever_is_drawn_follows_the_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str) -> None:
    endings = set()
    for seed in range(25):
        *ids, last = write(compiler.compile(GRAMMARS[kind]), seed)
        assert last in EOS
        assert is_word(kind, tokenizer.decode(ids, skip_special_tokens=False)), ids
        endings.add(last)
    assert endings == EOS


def test_it_ends_only_where_a_word_is_complete(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(GRAMMARS["choice"])
    assert not EOS & allowed(matcher)
    feed(matcher, tokenizer, "ye")
    assert not EOS & allowed(matcher)
    feed(matcher, tokenizer, "s")
    assert allowed(matcher) >= EOS
    assert {i for i in allowed(matcher) - EOS if not "terday".startswith(tokenizer.decode([i]))} == set()
    feed(matcher, tokenizer, "terday")
    assert allowed(matcher) == EOS
    matcher.accept(SURPLUS_EOS)
    assert allowed(matcher) == EOS


def test_ids_beyond_the_tokenizer_and_special_ones_are_never_allowed(compiler: GrammarCompiler) -> None:
    free = compiler.compile(LLMatcher.grammar_from_regex("(?s:.*)"))
    assert allowed(free) >= EOS
    assert allowed(free) - EOS <= set(range(TOKENIZER_SIZE))
    assert PAD_ID not in allowed(free)
    assert free.allowed().shape == (VOCAB,)


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first = compiler.compile(GRAMMARS["regex"])
    feed(first, tokenizer, "ab")
    before = allowed(first)
    second = first.fork()
    feed(second, tokenizer, "c-7")
    assert allowed(first) == before
    assert allowed(second) >= EOS
    second.accept(EOS_ID)
    third = second.fork()
    assert allowed(third) == EOS
    feed(first, tokenizer, "f-")
    assert not EOS & allowed(first)


def test_a_token_that_does_not_follow_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(GRAMMARS["choice"])
    with pytest.raises(InvalidRequestError, match="cannot end here"):
        matcher.accept(EOS_ID)
    with pytest.raises(InvalidRequestError, match="grammar failed"):
        feed(matcher.fork(), tokenizer, "x")
    feed(matcher, tokenizer, "yes")
    matcher.accept(EOS_ID)
    with pytest.raises(InvalidRequestError, match="has ended"):
        feed(matcher, tokenizer, "t")


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "{",
        "start: /a",
        LLMatcher.grammar_from_regex("["),
        '{"grammars":[{"json_schema":{"type":"nonsense"}}]}',
    ],
)
def test_a_wrong_grammar_is_refused(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"the grammar is wrong: .") as refused:
        compiler.compile(grammar)
    assert refused.value.param == "structured_outputs"
    assert "\n" not in refused.value.message


def test_a_checkpoint_without_a_usable_tokenizer_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
        GrammarCompiler(None, VOCAB, EOS).compile(GRAMMARS["regex"])
    broken = tmp_path / "tokenizer.json"
    broken.write_text("[]")
    with pytest.raises(InvalidRequestError, match="does not suit structured output"):
        GrammarCompiler(broken, VOCAB, EOS).compile(GRAMMARS["regex"])


def test_a_model_with_fewer_ids_than_the_tokenizer_gets_a_mask_of_its_size(tokenizer_json: Path) -> None:
    matcher = GrammarCompiler(tokenizer_json, 270, frozenset({EOS_ID})).compile(LLMatcher.grammar_from_regex("(?s:.*)"))
    assert matcher.allowed().shape == (270,)
    assert EOS_ID in allowed(matcher)


def test_end_of_text_that_is_not_the_models_ends_nothing(tokenizer_json: Path) -> None:
    """The tokenizer's own <|endoftext|> is id 0; this model ends with an id that the tokenizer does not know."""
    matcher = GrammarCompiler(tokenizer_json, VOCAB, frozenset({SURPLUS_EOS})).compile(
        LLMatcher.grammar_from_regex("a?")
    )
    assert 0 not in allowed(matcher)
    assert SURPLUS_EOS in allowed(matcher)


def test_many_threads_may_compile_at_once(tokenizer_json: Path) -> None:
    compiler = GrammarCompiler(tokenizer_json, VOCAB, EOS)
    barrier = threading.Barrier(4)

    def first_ids(kind: str) -> set[int]:
        barrier.wait(timeout=30)
        return allowed(compiler.compile(GRAMMARS[kind]))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(first_ids, ["regex", "choice", "regex", "choice"]))
    assert results[0] == results[2] != results[1] == results[3]


def test_a_grammar_that_may_not_end_before_min_tokens_names_both(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(GRAMMARS["choice"])
    feed(matcher, tokenizer, "yesterday")
    spec = SampleSpec.of(SamplingParams(20, min_tokens=15), EOS, token_ids=range(10), num_prompt=1, matcher=matcher)
    [refused] = sample(torch.zeros(1, VOCAB), [spec])
    assert isinstance(refused, InvalidRequestError)
    assert refused.param == "structured_outputs"
    assert "structured_outputs, min_tokens together leave no token" in refused.message
