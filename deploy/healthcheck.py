"""`python -m deploy.healthcheck http|grpc READY_FILE`: exit code 0 if the router or worker of this container serves.

Where it listens stands in its ready file (--ready-file). A router serves if /ready says so, a worker if its gRPC health
service does.
"""

import http.client
import json
import ssl
import sys
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

#: Less than the timeout of the images' HEALTHCHECK, so that the reason is told.
TIMEOUT_S = 4.0


def complaint(kind: str, ready_file: Path) -> str | None:
    """What is wrong, None if nothing is."""
    try:
        report = json.loads(ready_file.read_text())
    except OSError as error:
        return f"it does not serve yet: {error}"
    if kind == "http":
        return _router_complaint(str(report["address"]), tls=bool(report.get("tls")))
    # A worker with keys admits routers only, but for its own container.
    return _worker_complaint(str(report.get("local_address") or report["address"]))


def _router_complaint(address: str, *, tls: bool) -> str | None:
    if tls:
        # Its certificate is for the name that clients use, and it is asked on its own machine.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address, timeout=TIMEOUT_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"{address} does not answer: {error!r}"
    finally:
        connection.close()
    return None if answer.status == HTTPStatus.OK else f"/ready says {answer.status}: {body}"


def _worker_complaint(address: str) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{address} does not answer: {error}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{address} says {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2 or argv[0] not in ("http", "grpc"):
        print("usage: python -m deploy.healthcheck http|grpc READY_FILE", file=sys.stderr)
        return 2
    problem = complaint(argv[0], Path(argv[1]))
    if problem is not None:
        print(problem)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
