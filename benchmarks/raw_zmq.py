"""What plain pyzmq makes of the same frames: a DEALER that sends without copying, a ROUTER that only counts."""

from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection

import zmq

#: As many messages as are ever under way, so that neither socket ever waits for its queue.
HIGH_WATER_MARK = 32_768

#: The frames of one message.
Message = Sequence[bytes | memoryview]


class RawSender:
    """One DEALER on `endpoint`, used by one thread."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.connect(endpoint)

    def send(self, messages: Iterable[Message]) -> None:
        """Returns when the other side has said that it has all of them; the last one is empty."""
        for message in messages:
            self._socket.send_multipart(message, copy=False)
        self._socket.send(b"")
        self._socket.recv()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def receive_raw(endpoint: str, pipe: Connection) -> None:
    """Binds `endpoint`, tells the pipe its name, and serves RawSenders until the process is ended."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.bind(endpoint)
        pipe.send(socket.get_string(zmq.LAST_ENDPOINT))
        while True:
            peer, *frames = socket.recv_multipart(copy=False)
            if len(frames) == 1 and not len(frames[0].buffer):
                socket.send_multipart([peer.bytes, b""])
