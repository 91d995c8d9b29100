"""HTTPS for clients: certificates of our own making, over real sockets."""

import asyncio
import json
import math
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from cryptography.x509 import InvalidVersion
from structlog.testing import capture_logs

from common.config import RouterSettings, UpSettings
from common.errors import ConfigError, StartupError
from common.pb import types_pb2
from common.security.tls import load_tls
from deploy.cli import main
from deploy.healthcheck import complaint
from deploy.keys.certificates import Signed, new_authority, sign
from deploy.preflight import checked
from deploy.ready import read_ready_file
from tests.e2e.cluster import PATIENT_ROUTER
from tests.fakes.fake_workers import FakeWorker, Script, expected_tokens, serving
from tests.unit.router.cluster import GENERATE, split_events, strict_json
from tests.unit.router.test_process import process, wait_status

_BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
#: What no server would have, so that nothing passes by accident.
_HOST = "router.example"


class Certificates:
    """An authority, and files with what it signs for one host."""

    def __init__(self, folder: Path, name: str) -> None:
        self._authority = new_authority(name, now=datetime.now(UTC), days=10)
        self.ca_file = folder / f"{name}-ca.pem"
        self.certfile, self.keyfile = folder / "server.pem", folder / "server.key"
        self.ca_file.write_text(self._authority.certificate)

    def signed(self, days: int = 5) -> Signed:
        return sign(self._authority, _HOST, server=True, now=datetime.now(UTC), days=days)

    def write(self) -> Signed:
        """A new pair into the files."""
        pair = self.signed()
        self.certfile.write_text(pair.certificate)
        self.keyfile.write_text(pair.private_key)
        return pair

    @property
    def flags(self) -> list[str]:
        return ["--ssl-certfile", str(self.certfile), "--ssl-keyfile", str(self.keyfile)]

    @property
    def settings(self) -> RouterSettings:
        return RouterSettings(ssl_certfile=self.certfile, ssl_keyfile=self.keyfile)


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    certificates = Certificates(tmp_path, "ours")
    certificates.write()
    return certificates


@asynccontextmanager
async def https_router(folder: Path, *flags: str) -> AsyncIterator[tuple[str, str | None]]:
    """URL and control URL of a router process that is ready."""
    worker, ready = FakeWorker("decode-0", types_pb2.ROLE_BOTH, Script()), folder / "ready.json"
    async with serving(worker), aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session:
        arguments = ["--port", "0", "--decode", worker.address, "--ready-file", str(ready), "--pre-stop-s", "0"]
        async with process(*arguments, *PATIENT_ROUTER, *flags):
            async with asyncio.timeout(60):
                address = (await read_ready_file(ready)).address
            report = json.loads(ready.read_text())
            assert report["tls"] is True
            url = f"https://{address}"
            await wait_status(session, f"{url}/ready", 200)
            control = report["control_address"]
            yield url, None if control is None else f"https://{control}"


def trusting(ca_file: Path) -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(ca_file)))


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_client_that_trusts_the_authority(made: Certificates, tmp_path: Path, processes: str) -> None:
    flags = [*made.flags, "--router-processes", processes, "--admin-port", "0"]
    async with (
        https_router(tmp_path, *flags) as (url, control),
        aiohttp.ClientSession(connector=trusting(made.ca_file)) as http,
    ):
        async with http.post(f"{url}{GENERATE}", json=_BODY, server_hostname=_HOST) as response:
            whole = strict_json(await response.text())
        async with http.post(f"{url}{GENERATE}", json={**_BODY, "stream": True}, server_hostname=_HOST) as response:
            events = split_events(await response.read())
        async with http.get(f"{control}/is_paused", server_hostname=_HOST) as response:
            assert response.status == 200
        # The name is checked, too: this certificate is for another one than 127.0.0.1.
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"{url}/live")
        assert complaint("http", tmp_path / "ready.json") is None
    expected = expected_tokens([5, 6, 7], 4)
    assert whole["choices"][0]["token_ids"] == expected
    assert events[-1] == b"[DONE]"
    streamed = [strict_json(event.decode()) for event in events[:-1]]
    assert [token for event in streamed for choice in event["choices"] for token in choice["token_ids"]] == expected


async def test_a_client_that_trusts_another_authority(made: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path, "other")
    async with (
        https_router(tmp_path, *made.flags) as (url, _),
        aiohttp.ClientSession(connector=trusting(other.ca_file)) as http,
        aiohttp.ClientSession() as plain,
    ):
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"{url}/live", server_hostname=_HOST)
        with pytest.raises(aiohttp.ClientError):
            await plain.get(f"{url.replace('https', 'http')}/live")


async def test_commands_take_the_authority_from_the_variable_that_openssl_knows(
    made: Certificates, tmp_path: Path
) -> None:
    async with https_router(tmp_path, *made.flags) as (url, _):
        # The certificate's name does not fit the address, which is what a client that trusts it gets to complain of.
        for address, ca_file, words, fix in (
            (
                url,
                made.ca_file,
                "IP address mismatch, certificate is not valid for '127.0.0.1'",
                b"; give --url with a name that the certificate has\n",
            ),
            (
                url,
                Path(os.devnull),
                "unable to get local issuer certificate",
                b"; name its authority in the variable SSL_CERT_FILE\n",
            ),
            (url.replace("https", "http"), made.ca_file, "broke off: ", b"; is it meant to be https://?\n"),
        ):
            status = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "deploy.cli", "status", "--url", address),
                stderr=subprocess.PIPE,
                env={**os.environ, "SSL_CERT_FILE": str(ca_file)},
            )
            _, stderr = await status.communicate()
            assert status.returncode == 1
            assert words in stderr.decode()
            assert stderr.endswith(fix)


def shown(context: ssl.SSLContext, ca_file: Path) -> bytes:
    """The certificate (DER) that a new connection to a server with that context is shown; nothing leaves memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    trust = ssl.create_default_context(cafile=str(ca_file))
    client = trust.wrap_bio(to_client, to_server, server_hostname=_HOST)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


def test_files_that_are_replaced_count_for_new_connections(made: Certificates) -> None:
    tls = load_tls(made.settings)
    assert tls is not None
    before = ssl.PEM_cert_to_DER_cert(made.certfile.read_text())
    assert shown(tls.context, made.ca_file) == before
    following = made.signed()

    def look() -> None:
        for _ in range(2):  # a change is read at the second look that finds it
            for file in tls.files:
                file.poll()

    made.certfile.write_text(following.certificate)
    look()
    assert shown(tls.context, made.ca_file) == before, "half a pair"
    made.keyfile.write_text(following.private_key)
    look()
    assert shown(tls.context, made.ca_file) == ssl.PEM_cert_to_DER_cert(following.certificate)
    made.certfile.unlink()
    look()
    assert shown(tls.context, made.ca_file) == ssl.PEM_cert_to_DER_cert(following.certificate)


def end_of(certificate: bytes) -> float:
    """In seconds since the epoch, as the command `openssl` reads it; of DER."""
    command = ["openssl", "x509", "-inform", "der", "-noout", "-enddate"]
    said = subprocess.run(command, input=certificate, capture_output=True, check=True).stdout.decode()
    return ssl.cert_time_to_seconds(said.strip().removeprefix("notAfter="))


def test_seconds_left_are_those_of_the_certificate_that_is_shown(made: Certificates) -> None:
    """Also once another is, with more behind it; and the log says when they become few."""
    with capture_logs() as logs:
        tls = load_tls(made.settings)
        assert tls is not None
        end = end_of(shown(tls.context, made.ca_file))
        assert tls.seconds_left() == pytest.approx(end - time.time(), abs=60)
        [soon] = [log for log in logs if log["event"] == "https_certificate_ends_soon"]
        assert soon["expires"] == f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d}"
        following = made.signed(days=300)
        made.certfile.write_text(following.certificate + made.ca_file.read_text())
        made.keyfile.write_text(following.private_key)
        for _ in range(2):
            for file in tls.files:
                file.poll()
    end = end_of(shown(tls.context, made.ca_file))
    assert tls.seconds_left() == pytest.approx(end - time.time(), abs=60)
    assert tls.seconds_left() > 299 * 24 * 3600
    assert [log["event"] for log in logs].count("https_certificate_ends_soon") == 1


def test_who_only_looks_at_the_files_says_nothing_of_their_end(made: Certificates, tmp_path: Path) -> None:
    """`moerelay up` prints one line, and its router warns."""
    settings = UpSettings(model=str(tmp_path / "nowhere"), port=0, ssl_certfile=made.certfile, ssl_keyfile=made.keyfile)
    with capture_logs() as logs, pytest.raises(StartupError, match="nowhere"):
        checked(settings)
    assert logs == []


@pytest.mark.parametrize("error", [ValueError("no certificate"), InvalidVersion("5 is not valid", 5)])
def test_a_certificate_that_only_openssl_can_read_serves(
    made: Certificates, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("cryptography.x509.load_pem_x509_certificates", Mock(side_effect=error))
    tls = load_tls(made.settings)
    assert tls is not None
    assert math.isnan(tls.seconds_left())


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_the_metrics_tell_when_the_certificate_ends(made: Certificates, tmp_path: Path, processes: str) -> None:
    end = end_of(ssl.PEM_cert_to_DER_cert(made.certfile.read_text()))
    async with (
        https_router(tmp_path, *made.flags, "--router-processes", processes) as (url, _),
        aiohttp.ClientSession(connector=trusting(made.ca_file)) as http,
        http.get(f"{url}/metrics", server_hostname=_HOST) as response,
    ):
        text = await response.text()
    [left] = re.findall(r'^moerelay_certificate_seconds_left\{certificate="https"\} (\S+)$', text, re.M)
    assert float(left) == pytest.approx(end - time.time(), abs=60)


def test_one_file_for_both(made: Certificates) -> None:
    pair = made.write()
    made.certfile.write_text(pair.private_key + pair.certificate)
    tls = load_tls(RouterSettings(ssl_certfile=made.certfile))
    assert tls is not None
    assert shown(tls.context, made.ca_file) == ssl.PEM_cert_to_DER_cert(pair.certificate)
    assert load_tls(RouterSettings()) is None


def _wrong(made: Certificates, kind: str) -> RouterSettings:
    match kind:
        case "no-certificate":
            made.certfile.unlink()
        case "no-key":
            made.keyfile.unlink()
        case "other-key":
            made.keyfile.write_text(made.signed().private_key)
        case "not-pem":
            made.certfile.write_bytes(b"\x00")
        case "key-left-out":
            return RouterSettings(ssl_certfile=made.certfile)
        case "encrypted":
            command = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", str(made.keyfile)]
            encrypted = subprocess.run(command, capture_output=True, check=True).stdout
            made.keyfile.write_bytes(encrypted)
    return made.settings


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no-certificate", "--ssl-certfile {certfile} cannot be read: No such file or directory"),
        ("no-key", "--ssl-keyfile {keyfile} cannot be read: No such file or directory"),
        ("other-key", "--ssl-certfile {certfile} needs a certificate in PEM, and its private key, not encrypted, in "),
        ("not-pem", "--ssl-certfile {certfile} needs a certificate in PEM"),
        (
            "key-left-out",
            "--ssl-certfile {certfile} needs a certificate in PEM, and its private key, not encrypted, in it",
        ),
        ("encrypted", "--ssl-certfile {certfile} needs a certificate in PEM"),
    ],
    ids=["no-certificate", "no-key", "other-key", "not-pem", "key-left-out", "encrypted"],
)
def test_files_that_are_no_pair(made: Certificates, kind: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = _wrong(made, kind)
    with pytest.raises(ConfigError) as error:
        load_tls(settings)
    assert error.value.message.startswith(words.format(certfile=made.certfile, keyfile=made.keyfile))
    flags = made.flags if settings.ssl_keyfile else made.flags[:2]
    assert main(["up", "--model", "m", "--port", "0", *flags]) == 2
    assert main(["doctor", "--port", "0", *flags]) == 1
    found = capsys.readouterr()
    assert found.err == f"moerelay: error: {' '.join(error.value.message.split())}\n"
    assert any(line.startswith("bad   tls         --ssl-") for line in found.out.splitlines())


def test_a_key_without_a_certificate(made: Certificates, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", "m", "--ssl-keyfile", str(made.keyfile)]) == 2
    assert "--ssl-keyfile has no effect without --ssl-certfile; give both or neither" in capsys.readouterr().err


def test_the_doctor_knows_until_when(made: Certificates, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", "0", *made.flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"ok    tls         {made.certfile}: CN={_HOST}, with its key" in lines
    # Good for five days, begun an hour ago.
    assert any(
        line.startswith(f"warn  validity    {made.certfile}: the certificate ends on ") and "in 4 days" in line
        for line in lines
    )
