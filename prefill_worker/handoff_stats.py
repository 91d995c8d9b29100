"""What a prefill worker has handed over since it started."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import MoerelayError
from common.handoff.transfer import Transfer
from common.histogram import STAGE_BUCKETS, BucketCounts


class HandoffStats:
    """Totals of all transfers, and how long those took that came to their end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_sent = 0
        self.rows_sent = 0
        self.num_failed = 0
        #: From the first part of the prompt that was there to send, to the decode worker's last acknowledgement.
        self.send_seconds = BucketCounts(STAGE_BUCKETS)
        self._clock = clock

    @contextmanager
    def counted(self, transfer: Transfer, *, routing: bool) -> Iterator[None]:
        """Adds one transfer's payload, however it ends; an exception other than cancellation is a failure."""
        begin = transfer.position
        try:
            yield
        except MoerelayError:
            self.num_failed += 1
            raise
        finally:
            self.bytes_sent += transfer.num_bytes_sent
            self.rows_sent += (transfer.position - begin) if routing else 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around the sending of one prompt."""
        began = self._clock()
        yield
        self.send_seconds.observe(self._clock() - began)
