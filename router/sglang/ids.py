"""Ids of the choices of live SGLang batches, which clients may end one by one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from common.errors import DuplicateRequestError, InvalidRequestError
from router.live import LiveRequests
from router.validate import request_id


@dataclass(frozen=True, slots=True)
class ChoiceRef:
    """One choice of a live request."""

    request_id: str
    #: Index of its prompt.
    prompt: int
    #: Index among the choices of its prompt.
    choice: int


class ChoiceIds:
    """By id, every choice of a live batch."""

    def __init__(self) -> None:
        self._by_id: dict[str, ChoiceRef] = {}

    def get(self, choice_id: str) -> ChoiceRef | None:
        return self._by_id.get(choice_id)

    @contextmanager
    def registered(self, name: str, ids: Sequence[str], n: int, live: LiveRequests) -> Iterator[None]:
        """While the batch `name`, with `n` choices per prompt, runs.

        Raises:
            DuplicateRequestError: something live has one of these ids already.
        """
        for each in ids:
            if each in self._by_id or live.get(each):
                raise DuplicateRequestError(f"a live request has the id {each!r} already", param="rid")
        refs = {each: ChoiceRef(name, *divmod(index, n)) for index, each in enumerate(ids)}
        self._by_id |= refs
        live.choice_ids |= refs.keys()
        try:
            yield
        finally:
            live.choice_ids -= refs.keys()
            for each in refs:
                del self._by_id[each]


def choice_ids(name: str, rids: str | Sequence[str] | None, num_prompts: int, n: int) -> list[str]:
    """Ids of a batch's choices, in order: SGLang's `rid_0`, `rid_1`, …, or those of the request.

    Raises:
        InvalidRequestError: `rid` is a list that does not name every prompt once, or an id that cannot be used.
    """
    if rids is None or isinstance(rids, str):
        return [f"{name}_{index}" for index in range(num_prompts * n)]
    if len(rids) != num_prompts or len(set(rids)) != num_prompts:
        raise InvalidRequestError(
            f"rid must name each of the {num_prompts} prompts with an id of its own, got {len(rids)} ids", param="rid"
        )
    named = [request_id(None, rid, "") for rid in rids]
    return named if n == 1 else [f"{rid}_{choice}" for rid in named for choice in range(n)]


CHOICE_IDS = web.AppKey("sglang_choice_ids", ChoiceIds)
