"""Mutual TLS between router and workers: what gRPC is given of a key file."""

from collections.abc import Callable

import grpc

from common.security.key_file import KeyFile

#: What certificates of workers are for, and what a router asks for whatever a worker's address is: addresses change.
WORKER_NAME = "worker.moerelay"
#: The same of routers. Nobody asks for it: workers trust authorities that sign for routers only.
ROUTER_NAME = "router.moerelay"

#: gRPC compares the worker's certificate with this instead of its address.
CHANNEL_OPTIONS = [("grpc.ssl_target_name_override", WORKER_NAME)]


def channel_credentials(keys: KeyFile) -> grpc.ChannelCredentials:
    """A router's."""
    return grpc.ssl_channel_credentials(keys.trusted_pem, keys.private_key.encode(), keys.certificate.encode())


def server_credentials(current: Callable[[], KeyFile]) -> grpc.ServerCredentials:
    """A worker's. `current` is asked at each handshake, on a thread of gRPC's, so that new keys need no restart.

    Whoever shows no certificate that `trusted` has signed gets no further than the handshake.
    """

    def configuration() -> grpc.ServerCertificateConfiguration:
        keys = current()
        pair = (keys.private_key.encode(), keys.certificate.encode())
        return grpc.ssl_server_certificate_configuration([pair], keys.trusted_pem)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)
