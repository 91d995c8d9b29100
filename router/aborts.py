"""Ending live requests by name, on this process; whoever serves the routes asks the router's other processes too."""

from collections.abc import Iterable, Mapping

from aiohttp import web

from router.calls import all_tried
from router.keys import LIVE, PIPELINE
from router.live import LiveRequest
from router.sglang.ids import CHOICE_IDS, ChoiceRef


async def abort_here(app: web.Application, names: Iterable[str]) -> set[str]:
    """Ends those of the requests that are live here with finish reason "abort"; their names."""
    live = {name: found for name in names if (found := app[LIVE].get(name))}
    await all_tried(app[PIPELINE].abort(found) for found in live.values())
    return set(live)


async def abort_rid_here(app: web.Application, rid: str | None) -> list[str]:
    """Ends what SGLang's clients know by that id, or everything that is live here without one; what was found."""
    targets = _targets(app, rid)
    await all_tried(
        app[PIPELINE].abort(live, None if ref is None else (ref.prompt, ref.choice)) for live, ref in targets.values()
    )
    return list(targets)


def _targets(app: web.Application, rid: str | None) -> Mapping[str, tuple[LiveRequest, ChoiceRef | None]]:
    live = app[LIVE]
    if rid is None:
        return {each.request_id: (each, None) for each in live.requests()}
    if found := live.get(rid):
        return {rid: (found, None)}
    ref = app[CHOICE_IDS].get(rid)
    parent = None if ref is None else live.get(ref.request_id)
    return {} if parent is None else {rid: (parent, ref)}
