"""What a prefill worker reports about the handoffs that it sends."""

from common.worker.metrics import WorkerMetrics
from prefill_worker.handoff_stats import HandoffStats


def handoff_metrics(metrics: WorkerMetrics, stats: HandoffStats) -> None:
    """Registers them."""
    metrics.counter("handoff_bytes", "Bytes of KV and routing rows shipped.", lambda: stats.bytes_sent)
    metrics.counter("routing_rows_shipped", "Routing rows shipped.", lambda: stats.rows_sent)
    metrics.counter("handoff_failures", "Handoffs that ended in an error.", lambda: stats.num_failed)
    metrics.counted("handoff_send_seconds", "First part of a prompt to all acknowledged.", stats.send_seconds)
