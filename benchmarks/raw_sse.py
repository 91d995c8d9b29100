"""`python -m benchmarks.raw_sse`: an aiohttp handler that writes ready server-sent events, and nothing else.

POST /stream with `{"event": text, "num_events": n, "interval_ms": m}` streams that event n times; 0 milliseconds mean
as fast as they are taken. What a router can cost at the least.
"""

import argparse

from aiohttp import web

from benchmarks.stream_source import Pacer

PACER = web.AppKey("pacer", Pacer)


async def health(_: web.Request) -> web.Response:
    return web.Response()


async def stream(request: web.Request) -> web.StreamResponse:
    wanted = await request.json()
    event, interval_s = wanted["event"].encode(), wanted["interval_ms"] / 1000
    pacer = request.app[PACER]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for _ in range(wanted["num_events"]):
        if interval_s:
            await pacer.next(interval_s)
        await response.write(event)
    await response.write_eof()
    return response


def create_app() -> web.Application:
    app = web.Application(client_max_size=2**24)
    app[PACER] = Pacer()
    app.add_routes([web.get("/health", health), web.post("/stream", stream)])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.raw_sse", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    web.run_app(create_app(), host="127.0.0.1", port=parser.parse_args().port, print=None, access_log=None)
