"""Sends one request and reads its stream to the end, with plain blocking sockets (which gevent may make its own)."""

import json
import time
from collections.abc import Callable
from http.client import HTTPResponse

from deploy.load.contract import RowRules
from deploy.load.stream import Arrival, Ask, BrokenStreamError, StreamCheck
from deploy.load.target import Target

_PATH = "/inference/v1/generate"
_READ_BYTES = 64 * 1024


def run(target: Target, ask: Ask, rows: RowRules | None, on_arrival: Callable[[Arrival], None]) -> StreamCheck:
    """Tells of all tokens as they come; the answer once it was read to its end.

    Raises:
        BrokenStreamError: it was refused, failed, or broke off.
        BrokenContractError: it is not what the API promises.
        OSError, HTTPException: there is no connection any more.
    """
    body = ask.body()
    if rows is None:
        body["sampling_params"]["return_routed_experts"] = False
    content = json.dumps(body)
    connection = target.connect()
    try:
        check = StreamCheck(ask, rows, time.perf_counter())
        connection.request("POST", _PATH, body=content, headers=target.headers)
        response = connection.getresponse()
        if response.status != 200:
            raise BrokenStreamError(f"HTTP {response.status} {_error_of(response)}")
        while data := response.read1(_READ_BYTES):
            for arrival in check.feed(data, time.perf_counter()):
                on_arrival(arrival)
        check.finish()
        return check
    finally:
        connection.close()


def _error_of(response: HTTPResponse) -> str:
    text = response.read()
    try:
        error = json.loads(text)["error"]
        return f"{error['type']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return repr(text[:200])
