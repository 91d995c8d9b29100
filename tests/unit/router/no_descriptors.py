"""A process of its own that has no descriptor left while connections come; says what its event loop logged.

And whether that was no more than once a second, however long a busy machine takes for all this.
"""

import asyncio
import logging
import resource
import socket
import time

from structlog.testing import capture_logs

from router.connections import closing_what_cannot_be_kept

NUM_CLIENTS = 50


async def main() -> None:
    logging.basicConfig()
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, backlog=128)
    address = server.sockets[0].getsockname()
    clients = [socket.socket() for _ in range(NUM_CLIENTS)]
    began = time.monotonic()
    with closing_what_cannot_be_kept(), capture_logs() as logs:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as probe:
            resource.setrlimit(resource.RLIMIT_NOFILE, (probe.fileno(), hard))
        for client in clients:
            client.setblocking(True)
            client.connect(address)
            client.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(30):
            ends = [await loop.sock_recv(client, 1) for client in clients]
        # asyncio accepts again after a second, and then there is a descriptor.
        clients.pop().close()
        clients.pop().close()
        await asyncio.sleep(0)
        _, writer = await asyncio.open_connection(*address[:2])
        writer.close()
    is_rare = len(logs) <= time.monotonic() - began + 1
    print(len(ends), any(ends), sorted({entry["event"] for entry in logs}), logs[0]["number"], is_rare)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
