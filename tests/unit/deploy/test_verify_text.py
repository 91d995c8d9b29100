"""What verify knows of text: where a stop string ends an output, bad words as ids, texts that a grammar describes."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from common.engine.solo import SoloResult
from common.model.families import parse_config
from common.model.synthesize import synthesize
from common.sampling import Finish, FinishReason, SampledToken, SamplingParams
from deploy.verify.case import Case, Form, TextRules
from deploy.verify.expected import cut_at_stop, follow_grammar
from deploy.verify.grammars import GRAMMARS
from deploy.verify.solo_oracle import compile_grammars
from deploy.verify.vocabulary import Vocabulary, load_vocabulary

#: "é" is the bytes C3 A9, "Ã" and "©" in the byte-level alphabet; "Ġ" is a space.
PIECES = ["a", "b", "c", "Ã", "©", "Ġ", "ab", "Ġab", "<end>"]
A, B, C, E1, E2, SPACE, AB, _AB, END = range(9)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("tokenizer")
    backend = Backend(BPE({piece: i for i, piece in enumerate(PIECES[:-1])}, [("a", "b"), ("Ġ", "ab")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<end>"])
    backend.save(str(path / "tokenizer.json"))
    loaded = load_vocabulary(path, vocab_size=20)
    assert loaded is not None
    return loaded


def test_pieces_are_ascii_and_more_than_spaces(vocabulary: Vocabulary) -> None:
    assert vocabulary.pieces == ((A, "a"), (B, "b"), (C, "c"), (AB, "ab"), (_AB, " ab"))


def test_without_a_tokenizer_there_is_no_vocabulary(tmp_path: Path) -> None:
    assert load_vocabulary(tmp_path, 20) is None


@pytest.mark.parametrize(
    ("token_ids", "stops", "min_tokens", "found"),
    [
        ([A, B, C], ["z"], 0, None),
        ([A, B, C], ["b"], 0, (2, "b")),
        ([C, A, B, C], ["ab"], 0, (3, "ab")),  # over the border of two tokens
        ([C, _AB, C], ["a"], 0, (2, "a")),  # inside of a token
        ([C, AB], ["b", "a"], 0, (2, "b")),  # one token completes both: the first of the request
        ([A, C, A], ["a"], 1, (3, "a")),  # the first occurrence came too early
        ([A, B, C], ["ab"], 1, (2, "ab")),  # it began early, but ended in time
        ([A, B, A], ["ab"], 2, None),
        ([E1, A], ["a"], 0, (2, "a")),  # after bytes that are no character
        ([E1, E2, A], ["a"], 0, (3, "a")),
        ([E1, E2, A], ["a"], 2, (3, "a")),
        ([E1, A, E2], ["a"], 2, None),  # nothing that comes later makes an early occurrence count
        ([A, END, B], ["ab"], 0, (3, "ab")),  # special tokens are skipped
        ([A, 15, B], ["ab"], 0, (3, "ab")),  # an id without a token
    ],
)
def test_an_output_ends_at_the_token_that_completes_a_stop_string(
    vocabulary: Vocabulary, token_ids: list[int], stops: list[str], min_tokens: int, found: tuple[int, str] | None
) -> None:
    assert vocabulary.stop(token_ids, stops, min_tokens, skip_special_tokens=True) == found


def test_special_tokens_are_text_if_asked_for(vocabulary: Vocabulary) -> None:
    assert vocabulary.stop([A, END, B], ["ab", "<end>"], 0, skip_special_tokens=False) == (2, "<end>")


def test_bad_words_count_at_the_beginning_and_in_the_middle(vocabulary: Vocabulary) -> None:
    # " ab" is one token as "ab" is; " c" is two, "c" one.
    assert vocabulary.bad_words(["ab", " c"]) == ((AB,), (_AB,), (C,))


def case_with(text: TextRules, prompt_len: int = 3, start: int = 1) -> Case:
    return Case(0, (A,) * prompt_len, SamplingParams(max_tokens=9), 9, start, Form.WHOLE, text)


def test_a_cut_run_keeps_the_last_token_and_has_no_row_for_it(vocabulary: Vocabulary) -> None:
    rows_TLK = np.arange(5, dtype=np.uint8).reshape(5, 1, 1)  # positions 1 to 5
    tokens = tuple(SampledToken(i) for i in (C, A, B, C))
    solo = SoloResult(tokens, rows_TLK, Finish(FinishReason.LENGTH))
    cut = cut_at_stop(case_with(TextRules(stop=("ab",))), solo, vocabulary)
    assert [token.token_id for token in cut.tokens] == [C, A, B]
    assert cut.rows_TLK is not None
    assert cut.rows_TLK.tolist() == rows_TLK[:4].tolist()
    assert cut.finish.stop_reason == "ab"


@pytest.mark.parametrize(
    ("name", "complete", "incomplete"),
    [
        ("regex", ["ab", "abcdefgh-a-b-c"], ["a", "ab-", "ab-a-b-c-d", "Ab"]),
        ("choice", ["yes", "not-yet"], ["not", "yess", ""]),
        (
            "json",
            ['{"count":999, "done":true}'],
            ['{"count":1000,"done":true}', '{"count":1}', '{"count":1,"done":', "[]"],
        ),
    ],
)
def test_grammars_describe_texts(name: str, complete: list[str], incomplete: list[str]) -> None:
    assert all(GRAMMARS[name].is_complete(text) for text in complete)
    assert not any(GRAMMARS[name].is_complete(text) for text in incomplete)


def test_an_output_that_ends_without_completing_its_grammar_is_a_difference(vocabulary: Vocabulary) -> None:
    case = case_with(TextRules(grammar="regex"))
    ids = {"whole": (A, B, END), "half": (A, END)}
    runs = {name: SoloResult(tuple(map(SampledToken, i)), None, Finish(FinishReason.STOP)) for name, i in ids.items()}
    assert not list(follow_grammar(case, runs["whole"], vocabulary))
    [difference] = follow_grammar(case, runs["half"], vocabulary)
    assert difference.detail == "'a' is no regex that was asked for"


def test_a_tokenizer_without_letters_follows_no_grammar(vocabulary: Vocabulary, tmp_path: Path) -> None:
    synthesize("qwen3_moe", "tiny", 1, {}, tmp_path)
    config, full = parse_config(tmp_path), load_vocabulary(tmp_path, 512)
    assert full is not None
    assert set(compile_grammars(tmp_path, config, full)) == set(GRAMMARS)
    assert compile_grammars(tmp_path, config, vocabulary) == {}
