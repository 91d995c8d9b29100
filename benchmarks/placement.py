"""What each placement policy does for the prefix caches and for the balance of loads, on conversations of many turns.

`python -m benchmarks.placement` simulates a fleet, with the router's own policies; `--real` also runs a small trace on
`moerelay up --prefill 2 --decode 2` with each policy, and reads the workers' metrics.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.conversations import Shape, conversations
from benchmarks.placed_fleet import measure
from benchmarks.simulated_fleet import Outcome, SimulatedFleet, Speeds, imbalance
from common.model.synthesize import synthesize
from router.placement.policies import POLICIES

SIMULATED = Shape(num_conversations=1500, per_s=8.0)
#: Of the tiny model, whose context has 512 tokens; two cores compute it in a minute.
REAL = Shape(
    num_conversations=40,
    per_s=4.0,
    vocab_size=512,
    num_system_prompts=4,
    system_tokens=64,
    turns=(2, 6),
    user_tokens=(8, 40),
    output_tokens=(8, 24),
    pause_s=(0.1, 0.5),
)

HEADER = (
    "| policy | prefill hits | decode hits | prefill imbalance | decode imbalance | TTFT mean | TTFT p95 |\n"
    "|---|---|---|---|---|---|---|"
)


def row(name: str, outcome: Outcome) -> str:
    """One line of the table."""
    shares = (outcome.prefill_hits / outcome.num_prompt_tokens, outcome.decode_hits / outcome.num_prompt_tokens)
    balance = (imbalance(outcome.prefill_work), imbalance(outcome.decode_work))
    times = (float(np.mean(outcome.ttfts_s)), float(np.percentile(outcome.ttfts_s, 95)))
    cells = [f"`{name}`", *(f"{100 * share:.0f} %" for share in shares), *(f"{each:.2f}" for each in balance)]
    return "| " + " | ".join([*cells, *(f"{1000 * each:.0f} ms" for each in times)]) + " |"


def simulate(num_routers: int, seed: int) -> None:
    trace = list(conversations(SIMULATED, seed))
    num_requests = sum(len(conversation.turns) for conversation in trace)
    print(f"\nSimulated: 4 prefill and 4 decode workers, {num_routers} router(s), {num_requests} requests\n\n{HEADER}")
    for name in POLICIES:
        fleet = SimulatedFleet(name, num_prefill=4, num_decode=4, num_routers=num_routers, speeds=Speeds(), seed=seed)
        print(row(name, fleet.run(trace)), flush=True)


async def run_real(seed: int) -> None:
    trace = list(conversations(REAL, seed))
    num_requests = sum(len(conversation.turns) for conversation in trace)
    print(f"\nMeasured: moerelay up --prefill 2 --decode 2, the tiny model, {num_requests} requests\n\n{HEADER}")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        synthesize("qwen3_moe", "tiny", 0, {}, model)
        for name in POLICIES:
            print(row(name, await measure(model, name, trace)), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--real", action="store_true", help="run a small trace on real workers, too")
    arguments = parser.parse_args(argv)
    for num_routers in (1, 4):
        simulate(num_routers, arguments.seed)
    if arguments.real:
        asyncio.run(run_real(arguments.seed))


if __name__ == "__main__":
    main()
