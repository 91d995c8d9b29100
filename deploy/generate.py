"""`moerelay generate`: streams one completion to the terminal, then shows which experts computed it."""

import asyncio
import codecs
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from common.arguments import ArgumentParser
from common.errors import ConfigError
from common.routing.record import RoutingArray
from deploy.arguments import add_api_key_file, first_key, integer, token_ids, url
from deploy.client import ClusterClient, Json, decode_rows, join_rows
from deploy.expert_chart import chart_lines
from deploy.terminal import stdout
from deploy.text import TextStream, load_tokenizer

#: Flags that are sent as they are; the server checks their ranges and names the field.
_SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")


@dataclass
class Completion:
    """What a stream has brought so far."""

    num_tokens: int = 0
    arrays: list[RoutingArray] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Json = field(default_factory=dict)

    def rows_TLK(self) -> RoutingArray | None:
        """All rows; None when there are none to show, or the answer ended before its first token and they are void."""
        if not self.arrays or not self.num_tokens:
            return None
        return join_rows(self.arrays)


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser("moerelay generate", "Stream one completion, then show the routing that came with it.")
    parser.add_argument("--url", type=url, default="http://127.0.0.1:8000", help="the router (default: %(default)s)")
    add_api_key_file(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text; needs the checkpoint's tokenizer on this machine")
    prompt.add_argument("--token-ids", type=token_ids, help="prompt as ids, e.g. 1,2,3")
    parser.add_argument(
        "--model", type=Path, help="checkpoint directory; default: what the server names, if it is here"
    )
    parser.add_argument("--max-tokens", type=integer(1), default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument("--top-p", type=float, help="nucleus mass")
    parser.add_argument("--top-k", type=integer(-1), help="number of candidates")
    parser.add_argument("--min-p", type=float, help="smallest share of the best candidate's probability")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = vars(command_line().parse_args(argv))
    sampling = {name: arguments[name] for name in _SAMPLING_FLAGS if arguments[name] is not None}
    sampling["ignore_eos"] = arguments["ignore_eos"]
    prompt = arguments["prompt"] if arguments["token_ids"] is None else arguments["token_ids"]
    client = ClusterClient(arguments["url"], api_key=first_key(arguments["api_key_file"]))
    return asyncio.run(generate(client, prompt, sampling, arguments["model"], stdout()))


async def generate(
    client: ClusterClient, prompt: str | list[int], sampling: dict[str, Any], model: Path | None, console: Console
) -> int:
    """Opens the client, streams and prints one completion. Raises MoerelayError when it is refused or breaks off."""
    async with client:
        tokenizer = await _find_tokenizer(client, model)
        if isinstance(prompt, str) and tokenizer is None:
            raise ConfigError("a --prompt needs the tokenizer: name the checkpoint with --model, or send --token-ids")
        ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) and tokenizer else prompt
        body = {
            "token_ids": ids,
            "sampling_params": sampling,
            "stream_options": {"include_usage": True, "routed_experts": "delta"},
        }
        completion = await _print_tokens(client, body, tokenizer, console)
    _print_summary(completion, console)
    return 0


async def _find_tokenizer(client: ClusterClient, model: Path | None) -> Tokenizer | None:
    """That of `model` if named, else that of the served checkpoint if it lies on this machine."""
    if model is not None:
        return load_tokenizer(model)
    models = await client.get("/v1/models")
    root = models["data"][0].get("root")
    if root and (Path(root) / "tokenizer.json").is_file():
        return load_tokenizer(Path(root))
    return None


async def _print_tokens(client: ClusterClient, body: Json, tokenizer: Tokenizer | None, console: Console) -> Completion:
    completion = Completion()
    text = TextStream(tokenizer) if tokenizer else None
    async for event in client.stream(body):
        completion.usage = event.get("usage") or completion.usage
        for choice in event["choices"]:
            ids = choice["token_ids"]
            shown = text.push(ids) if text else "".join(f"{token_id} " for token_id in ids)
            console.out(shown, end="", highlight=False)
            completion.num_tokens += len(ids)
            completion.finish_reason = choice["finish_reason"]
            if choice["routed_experts"] is not None:
                completion.arrays.append(decode_rows(choice["routed_experts"]))
    console.out(text.finish() if text else "", highlight=False)
    return completion


def _print_summary(completion: Completion, console: Console) -> None:
    prompt_tokens = completion.usage.get("prompt_tokens", "?")
    console.print(
        f"{prompt_tokens} prompt tokens + {completion.num_tokens} generated, finish_reason {completion.finish_reason}",
        style="dim",
    )
    rows_TLK = completion.rows_TLK()
    if rows_TLK is None:
        console.print("no routing rows: routing is switched off, or the answer has no token")
        return
    shape = f"shape {rows_TLK.shape} (positions, layers, experts per token), {rows_TLK.dtype}"
    console.print(f"routed_experts: {shape}", soft_wrap=True)
    blocks = codecs.lookup(console.encoding).name.startswith("utf")
    for line in chart_lines(rows_TLK, blocks=blocks):
        console.print(line, soft_wrap=True)
    sys.stdout.flush()
