"""Ending live requests by name, on this process; whoever serves the routes asks the router's other processes too."""

from collections.abc import Iterable, Mapping

from aiohttp import web

from common.errors import MoerelayError
from router.calls import all_tried
from router.errors import error_named, status_of
from router.keys import LIVE, PIPELINE
from router.live import LiveRequest
from router.processes.siblings import Aborted
from router.sglang.ids import CHOICE_IDS, ChoiceRef

#: Of ids in an error.
_MAX_TOLD_CHARS = 1024


async def abort_here(app: web.Application, names: Iterable[str]) -> Aborted:
    """Ends those of the requests that are live here with finish reason "abort"."""
    return await _abort(app, {name: (found, None) for name in names if (found := app[LIVE].get(name))})


async def abort_rid_here(app: web.Application, rid: str | None) -> Aborted:
    """Ends what SGLang's clients know by that id, or everything that is live here without one."""
    return await _abort(app, _targets(app, rid))


def ended(aborted: Iterable[Aborted]) -> list[str]:
    """What was ended on all processes together, each once.

    Raises:
        MoerelayError: of the first that could not be ended. It says which were: whoever tries again finds them gone.
    """
    every = list(aborted)
    found = list(dict.fromkeys(name for each in every for name in each.aborted))
    for name, (kind, message) in ((name, why) for each in every for name, why in each.failed.items()):
        told = f"; these were ended: {', '.join(found)[:_MAX_TOLD_CHARS]}" if found else ""
        raise error_named(kind, f"{name} could not be ended: {message}{told}")
    return found


async def _abort(app: web.Application, targets: Mapping[str, tuple[LiveRequest, ChoiceRef | None]]) -> Aborted:
    done, failed = list[str](), dict[str, tuple[str, str]]()

    async def end(name: str, live: LiveRequest, ref: ChoiceRef | None) -> None:
        try:
            await app[PIPELINE].abort(live, None if ref is None else (ref.prompt, ref.choice))
            done.append(name)
        except MoerelayError as error:
            failed[name] = (status_of(error)[1], error.message)

    await all_tried(end(name, live, ref) for name, (live, ref) in targets.items())
    return Aborted([name for name in targets if name in done], failed)


def _targets(app: web.Application, rid: str | None) -> Mapping[str, tuple[LiveRequest, ChoiceRef | None]]:
    live = app[LIVE]
    if rid is None:
        return {each.request_id: (each, None) for each in live.requests()}
    if found := live.get(rid):
        return {rid: (found, None)}
    ref = app[CHOICE_IDS].get(rid)
    parent = None if ref is None else live.get(ref.request_id)
    return {} if parent is None else {rid: (parent, ref)}
