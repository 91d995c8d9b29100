"""What a decode worker reports about the handoffs that it receives."""

from common.handoff.receiver import HandoffReceiver
from common.worker.metrics import WorkerMetrics
from decode_worker.intake import Intake

#: From an idle engine, which takes a prompt over at once, to one whose step is a long prompt's.
COMMIT_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def handoff_metrics(metrics: WorkerMetrics, receiver: HandoffReceiver, intake: Intake) -> None:
    """Registers them."""
    metrics.counter("handoff_bytes", "Bytes of KV and routing rows received.", lambda: receiver.bytes_received)
    metrics.counter("routing_rows_received", "Routing rows received.", lambda: receiver.rows_received)
    metrics.counter("handoff_failures", "Handoffs that ended in an error.", lambda: intake.num_failed)
    metrics.counter("handoff_discarded", "Messages for leases that were over.", lambda: receiver.num_discarded)
    metrics.counter("handoff_malformed", "Messages that could not be read.", lambda: receiver.num_malformed)
    intake.observe_commit = metrics.histogram(
        "handoff_commit_seconds", "A handoff's last message to the engine's next step.", COMMIT_BUCKETS
    )
