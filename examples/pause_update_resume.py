"""New weights in the middle of a stream: `python examples/pause_update_resume.py URL CONTROL_URL CHECKPOINT [KEY]`.

Needs aiohttp only, and a cluster that was started with --admin-port. CHECKPOINT is a directory on the workers'
machines; KEY is one of --admin-key-file, if there is one. An update that fails leaves no pause behind: the cluster
serves the weights that it has.
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp

BODY = {
    "token_ids": [5, 6, 7, 8, 9],
    # So many that the pause finds the stream under way, and few enough for the context of what `make-model` writes.
    "sampling_params": {"max_tokens": 1000, "temperature": 0, "ignore_eos": True},
    "stream": True,
}


class Rollout:
    """One stream, read in the background."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.num_tokens = 0
        self.versions: list[dict[str, Any]] = []

    async def read(self, session: aiohttp.ClientSession) -> None:
        async with session.post("/inference/v1/generate", json=BODY) as response:
            response.raise_for_status()
            async for line in response.content:
                payload = line.decode().removeprefix("data: ").strip()
                if payload == "[DONE]":
                    return
                if payload:
                    self._take(json.loads(payload))
        raise RuntimeError("the stream broke off: without [DONE] it is not finished")

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        [choice] = event["choices"]
        self.num_tokens += len(choice["token_ids"])
        self.versions = choice["weight_versions"] or self.versions
        if self.num_tokens:
            self.begun.set()


async def post(control: aiohttp.ClientSession, path: str, body: dict[str, Any] | None = None) -> Any:
    async with control.post(path, json=body or {}) as response:
        answer = await response.json()
        if response.status != 200:
            raise SystemExit(f"{path}: {answer['error']['message']}")
        return answer


async def main(url: str, control_url: str, checkpoint: str, key: str | None = None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(url) as public, aiohttp.ClientSession(control_url, headers=headers) as control:
        rollout = Rollout()
        async with asyncio.TaskGroup() as group:
            group.create_task(rollout.read(public))
            await rollout.begun.wait()

            # Freezes the stream between two tokens; new requests get a 503 with Retry-After.
            await post(control, "/pause", {"mode": "keep"})
            frozen_at = rollout.num_tokens
            try:
                # Loads on every worker, then switches all of them, or none. The pause stays.
                updated = await post(control, "/update_weights", {"path": checkpoint})
                print(f"version {updated['version']!r} while {updated['num_paused_requests']} request(s) stood still")
            finally:
                # The stream goes on with the KV it has, and the new weights. Where no worker could load them, all have
                # the old ones, and serving these is right, too: a cluster that stays paused serves nobody.
                await post(control, "/resume")
    print(f"{frozen_at} tokens had come when the pause began, {rollout.num_tokens} at the end:")
    for span in rollout.versions:
        print(f"  tokens {span['start']} to {span['end']}: weights {span['version']!r}")


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    asyncio.run(main(*sys.argv[1:]))
