"""`moerelay advise`: how many prefill and decode workers a workload needs, from what a running cluster has measured."""

import argparse
import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from common.arguments import ArgumentParser
from common.setting_types import Duration
from deploy.advise.advice import (
    TARGET,
    DecodeAdvice,
    PrefillAdvice,
    Workload,
    best_split,
    decode_advice,
    needed,
    prefill_advice,
)
from deploy.advise.profile import ClusterProfile, read_profile
from deploy.arguments import add_api_key_file, first_key, integer, url
from deploy.client import ClusterClient

_DURATION: TypeAdapter[float] = TypeAdapter(Duration)


def duration(text: str) -> float:
    """'50ms' or '0.05' → seconds."""
    try:
        return _DURATION.validate_python(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 50ms, 2s or 0.5") from None


def rate(text: str) -> float:
    """A positive number per second."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is not a rate; it must be more than 0")
    return value


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser("moerelay advise", "How many prefill and decode workers a workload needs.")
    parser.add_argument("--url", type=url, default="http://127.0.0.1:8000", help="the router (default: %(default)s)")
    add_api_key_file(parser)
    parser.add_argument("--prompt-tokens", type=integer(1), required=True, help="tokens of a prompt")
    parser.add_argument("--output-tokens", type=integer(1), required=True, help="tokens of an output")
    parser.add_argument("--slo-ttft", type=duration, required=True, help="time to first token, e.g. 1s")
    parser.add_argument("--slo-itl", type=duration, required=True, help="time between tokens, e.g. 50ms")
    parser.add_argument("--rate", type=rate, help="requests per second; default: only what one worker can do")
    parser.add_argument("--workers", type=integer(2), help="workers to be split into both kinds, of the measured size")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = command_line().parse_args(argv)
    workload = Workload(arguments.prompt_tokens, arguments.output_tokens, arguments.slo_ttft, arguments.slo_itl)
    client = ClusterClient(arguments.url, api_key=first_key(arguments.api_key_file))
    profile = asyncio.run(measured(client))
    print("\n".join(report(profile, workload, arguments.rate, arguments.workers)))
    return 0


async def measured(client: ClusterClient) -> ClusterProfile:
    """What the cluster has measured. Raises UnavailableError if that is too little."""
    async with client:
        return read_profile(await client.get("/cluster"))


def report(
    profile: ClusterProfile, workload: Workload, rate: float | None = None, num_workers: int | None = None
) -> Iterator[str]:
    """The advice, line by line. Workers of a kind count as alike: their rates are averaged."""
    prefill = [prefill_advice(worker, workload) for worker in profile.prefill]
    decode = [decode_advice(worker, workload) for worker in profile.decode]
    prefill_rate, decode_rate = fmean(p.max_rate for p in prefill), fmean(d.max_rate for d in decode)
    yield _prefill_line(prefill, prefill_rate)
    yield _decode_line(decode, decode_rate)
    if prefill_rate and math.isfinite(decode_rate) and decode_rate:
        yield f"ratio: {decode_rate / prefill_rate:.2f} prefill workers per decode worker"
    if rate is not None:
        yield _needed_line(rate, prefill_rate, decode_rate)
        yield _expected_line(rate, prefill, decode)
    if num_workers is not None:
        split = best_split(num_workers, prefill_rate, decode_rate)
        yield (
            f"of {num_workers} workers: {split.num_prefill} prefill and {split.num_decode} decode serve "
            f"{split.goodput:.2f} requests/s in time"
        )


def _prefill_line(advice: Sequence[PrefillAdvice], max_rate: float) -> str:
    prompt_s = fmean(each.prompt_s for each in advice)
    if not max_rate:
        ttft_s = advice[0].ttft_s
        return f"prefill: a prompt takes {prompt_s:.3f} s, which is too long for a first token within {ttft_s:g} s"
    return f"prefill: a prompt takes {prompt_s:.3f} s; one worker serves {max_rate:.2f} requests/s in time"


def _decode_line(advice: Sequence[DecodeAdvice], max_rate: float) -> str:
    if not math.isfinite(max_rate):
        return "decode: outputs of one token, which comes with the prompt, need no step; decode workers bound nothing"
    alone_s, batch = fmean(each.step_s(1) for each in advice), fmean(each.batch for each in advice)
    if not batch:
        return f"decode: a step with one sequence takes {1000 * alone_s:.1f} ms already, which is too long"
    full_s = fmean(each.step_s(each.batch) for each in advice)
    return (
        f"decode: {batch:.0f} sequences at a time, in steps of {1000 * full_s:.1f} ms (one: {1000 * alone_s:.1f} ms); "
        f"one worker serves {max_rate:.2f} requests/s in time"
    )


def _needed_line(rate: float, prefill_rate: float, decode_rate: float) -> str:
    num_prefill, num_decode = needed(rate, prefill_rate), needed(rate, decode_rate)
    if num_prefill is None or num_decode is None:
        return (
            f"for {rate:g} requests/s: no number of such workers is enough; raise the objective or use larger workers"
        )
    return (
        f"for {rate:g} requests/s: {num_prefill} prefill and {num_decode} decode workers, so that {TARGET:.0%} of the "
        "requests keep to each objective"
    )


def _expected_line(rate: float, prefill: Sequence[PrefillAdvice], decode: Sequence[DecodeAdvice]) -> str:
    """What the workers that there are will do; requests are spread evenly over them."""
    in_time = _mean_at([each.attainment for each in prefill], rate)
    steady = _mean_at([each.attainment for each in decode], rate)
    return (
        f"the {len(prefill)} prefill and {len(decode)} decode workers that were measured: {in_time:.0%} in time for "
        f"the first token, {steady:.0%} between tokens: goodput {rate * in_time * steady:.2f} requests/s"
    )


def _mean_at(attainments: Sequence[Callable[[float], float]], rate: float) -> float:
    return fmean(attainment(rate / len(attainments)) for attainment in attainments)
