"""What somebody meant who wrote a flag, a command or a setting that there is not."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches

#: Below this share of equal letters, a suggestion misleads more often than it helps.
_SIMILAR = 0.7

#: vLLM's flags that are called otherwise here, and what to do instead.
VLLM_FLAGS = {
    "--api-key": "is --api-key-file here: a file with one key per line",
    "--allowed-origins": "is --cors-origin here",
    "--data-parallel-size": "is --decode here: the number of decode workers",
    "--disable-log-requests": "is not needed: --log-level warning logs less",
    "--download-dir": "is the variable HF_HOME here",
    "--enable-chunked-prefill": "is not needed: --max-num-batched-tokens is the size of a chunk",
    "--enforce-eager": "is not needed: no graphs are captured",
    "--gpu-memory-utilization": "is --kv-cache-memory here: a size, e.g. --kv-cache-memory 4GiB",
    "--kv-cache-memory-bytes": "is --kv-cache-memory here",
    "--kv-transfer-config": "is not needed: --prefill and --decode say how many workers there are of each kind",
    "--num-gpu-blocks-override": "is --num-kv-blocks here",
    "--quantization": "is not needed: the checkpoint's config.json says it",
    "--seed": "is sampling_params.seed of each request here",
    "--trust-remote-code": "is not needed: code of a checkpoint is never run",
    "--uvicorn-log-level": "is --log-level here",
}

#: Commands of vLLM, and ours.
VLLM_COMMANDS = {
    "serve": "up --model MODEL",
    "chat": "generate --prompt TEXT",
    "complete": "generate --prompt TEXT",
    "collect-env": "doctor",
}


def close_match(word: str, known: Collection[str]) -> str | None:
    """The most similar of the known words, if one is similar enough. Dashes in front do not count."""
    bare = {name.lstrip("-"): name for name in known}
    found = get_close_matches(word.lstrip("-"), bare, n=1, cutoff=_SIMILAR)
    return bare[found[0]] if found else None


def about_command(word: str, known: Collection[str]) -> str:
    """'did you mean …?' as the beginning of a sentence that goes on; '' where nothing is known about it."""
    if word in VLLM_COMMANDS:
        return f"vLLM's {word} is `moerelay {VLLM_COMMANDS[word]}` here; "
    match = close_match(word, known)
    return "" if match is None else f"did you mean {match}? "


def about_arguments(unknown: Sequence[str], given: Sequence[str], known: Collection[str]) -> str:
    """Sentences about arguments that a parser does not know; '' where nothing is known about them.

    Args:
        unknown: the arguments, with the values of unknown flags behind them.
        given: the whole command line.
        known: flags.
    """
    # A word of its own is vLLM's way to name the model; where there is a prompt to give, it may as well be that.
    wants_model = "--model" in known and "--prompt" not in known
    wants_model = wants_model and not any(word.partition("=")[0] == "--model" for word in given)
    sentences, before = list[str](), ""
    for word in unknown:
        flag = word.partition("=")[0]
        if not word.startswith("-"):
            # What follows an unknown flag is its value.
            if wants_model and not before.startswith("-"):
                sentences.append(f"did you mean --model {word}?")
        elif flag in VLLM_FLAGS:
            sentences.append(f"vLLM's {flag} {VLLM_FLAGS[flag]}")
        elif match := close_match(flag, known):
            sentences.append(f"did you mean {match}?")
            wants_model = wants_model and match != "--model"
        before = "" if "=" in word else word
    return "; ".join(sentences)
