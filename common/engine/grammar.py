"""Structured output: which tokens a grammar allows next. llguidance parses; this fits it to the model's vocabulary."""

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.errors import InvalidRequestError

#: [V], True where the id may come next.
AllowedMask = npt.NDArray[np.bool_]

_PARAM = "structured_outputs"


class GrammarMatcher:
    """Where one choice stands in its grammar. Used by one thread at a time."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int], own_eos: frozenset[int]
    ) -> None:
        """Args:
        vocab_size: the model's, V.
        eos_token_ids: the model's; ids beyond the vocabulary are ignored.
        own_eos: what llguidance takes for end-of-sequence ids.
        """
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos = np.array(sorted(i for i in eos_token_ids if i < vocab_size), np.int64)
        self._own_eos = np.array(sorted(i for i in own_eos if i < vocab_size), np.int64)
        self._ended = False

    def fork(self) -> "GrammarMatcher":
        """A copy that goes its own way from here."""
        other = GrammarMatcher.__new__(GrammarMatcher)
        other._matcher = self._matcher.deep_copy()
        other._vocab_size = self._vocab_size
        other._eos, other._own_eos = self._eos, self._own_eos
        other._ended = self._ended
        return other

    def allowed(self) -> AllowedMask:
        """The ids that may come next, [V]: end-of-sequence ids where the grammar may end, and only them once one came.

        Raises:
            InvalidRequestError: the parser hit one of its limits.
        """
        mask_V = np.zeros(self._vocab_size, np.bool_)
        if not self._ended:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known_V = np.unpackbits(bits, count=min(8 * len(bits), self._vocab_size), bitorder="little")
            self._check()
            mask_V[: len(known_V)] = known_V
            mask_V[self._own_eos] = False
        mask_V[self._eos] = self._ended or self._matcher.is_accepting()
        return mask_V

    def accept(self, token_id: int) -> None:
        """Goes one token on; ids that `allowed` allows.

        Raises:
            InvalidRequestError: the grammar does not allow the token, or the parser hit one of its limits.
        """
        if token_id in self._eos:
            if not self._ended and not self._matcher.is_accepting():
                raise InvalidRequestError(f"the grammar cannot end here, but token {token_id} ends it", param=_PARAM)
            self._ended = True
        elif self._ended:
            raise InvalidRequestError(f"the grammar has ended, but token {token_id} follows", param=_PARAM)
        else:
            self._matcher.consume_token(token_id)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequestError(f"the grammar failed: {_first_line(self._matcher)}", param=_PARAM)


class GrammarCompiler:
    """Grammars of one checkpoint. Usable from any thread."""

    def __init__(self, tokenizer_json: Path | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Args:
        tokenizer_json: the checkpoint's; read with the first grammar. None if there is none.
        vocab_size: the model's, which may be larger than the tokenizer's.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: str) -> GrammarMatcher:
        """A matcher at the beginning of the grammar, llguidance's JSON form or its Lark dialect.

        Raises:
            InvalidRequestError: the grammar is wrong or too large, or the checkpoint has no tokenizer that will do.
        """
        tokenizer = self._load_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar is wrong: {_first_line(matcher)}", param=_PARAM)
        return GrammarMatcher(matcher, self._vocab_size, self._eos_token_ids, frozenset(tokenizer.eos_tokens))

    def _load_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _read_tokenizer(self._tokenizer_json, self._eos_token_ids)
            return self._tokenizer


def _read_tokenizer(path: Path | None, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """The tokenizer as llguidance sees it, told which ids end a sequence as far as it knows them."""
    if path is None:
        raise InvalidRequestError("the checkpoint has no tokenizer.json, which structured output needs", param=_PARAM)
    try:
        tokenizer = LLTokenizer(str(path))
        known_eos = sorted(i for i in eos_token_ids if i < tokenizer.vocab_size)
        return LLTokenizer(str(path), eos_token=known_eos) if known_eos else tokenizer
    except ValueError as error:
        raise InvalidRequestError(
            f"the checkpoint's tokenizer.json does not suit structured output: {str(error).splitlines()[0]}",
            param=_PARAM,
        ) from error


def _first_line(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0]
