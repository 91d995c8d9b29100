"""A worker's keys: read and checked before anything heavy is done."""

from common.config import WorkerSettings
from common.security.exposure import check_grpc
from common.security.key_file import KeyFile, KeyRole, watch_key_file
from common.security.watched_file import WatchedFile
from common.worker.metrics import WorkerMetrics


def load_keys(settings: WorkerSettings, role: KeyRole) -> WatchedFile[KeyFile] | None:
    """Raises ConfigError if they cannot be used, or the worker would be open to other machines without any."""
    check_grpc(settings.host, has_keys=settings.cluster_key_file is not None, insecure=settings.insecure)
    return None if settings.cluster_key_file is None else watch_key_file(settings.cluster_key_file, role)


def key_metrics(metrics: WorkerMetrics, keys: WatchedFile[KeyFile] | None) -> None:
    """When the certificate ends, of a worker that has one."""
    if keys is not None:
        left = {"cluster": lambda: keys.value.seconds_left()}
        metrics.gauges("certificate_seconds_left", "Until the certificate ends.", "certificate", left)
