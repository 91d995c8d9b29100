"""Trains a small byte-level BPE tokenizer on the text that ships with moerelay, and writes it in Hugging Face form."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT, TURN_START, TURN_END, PADDING = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"

#: Ids 0 to 3, in this order.
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PADDING)
BOS_ID, EOS_ID, PAD_ID = (SPECIAL_TOKENS.index(token) for token in (END_OF_TEXT, TURN_END, PADDING))

#: The special tokens and one token per byte: without these some text would have no encoding.
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = Path(__file__).with_name("corpus.txt")


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` (at least MIN_VOCAB_SIZE) tokens; the same one for the same size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(_CORPUS)], trainer)
    return tokenizer


def write_tokenizer(out: Path, vocab_size: int, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template) into `out`."""
    train_tokenizer(vocab_size).save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": PADDING,
        # The post-processor adds no token, so neither may a reader that goes by these settings.
        "add_bos_token": False,
        "add_eos_token": False,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
