"""Generations: what each file shows, and what the others believe."""

from datetime import UTC, datetime, timedelta

import zmq
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from zmq.utils import z85

from common.security.key_file import KeyFile
from deploy.keys.authority import Authority

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def new() -> Authority:
    return Authority.new(now=NOW, days=10)


def certificate(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def believes(keys: KeyFile, other: KeyFile) -> bool:
    """Whether one of the authorities that `keys` trusts has signed what `other` shows."""
    shown = certificate(other.certificate)
    for pem in keys.trusted:
        authority = certificate(pem)
        if authority.subject == shown.issuer:
            shown.verify_directly_issued_by(authority)
            return True
    return False


def file(authority: Authority, role: str) -> KeyFile:
    return authority.key_file(role, now=NOW, days=10)  # type: ignore[arg-type]


def test_routers_and_workers_believe_each_other_and_nobody_else() -> None:
    authority, other = new(), new()
    router, prefill, decode = (file(authority, role) for role in ("router", "prefill", "decode"))
    assert all(believes(router, worker) and believes(worker, router) for worker in (prefill, decode))
    assert not believes(router, router)
    assert not believes(prefill, decode)
    assert not believes(router, file(other, "decode"))
    assert not believes(decode, file(other, "router"))


def test_neighbouring_generations_fit_both_ways() -> None:
    first = new()
    second = first.rotated(now=NOW, days=10)
    third = second.rotated(now=NOW, days=10)
    for old, young in ((first, second), (second, third)):
        for a, b in ((old, young), (young, old)):
            assert believes(file(a, "router"), file(b, "prefill"))
            assert believes(file(a, "prefill"), file(b, "router"))
            assert b.current.handoff_public_key in file(a, "decode").handoff_clients
    assert not believes(file(third, "prefill"), file(first, "router"))
    assert not believes(file(first, "prefill"), file(third, "router"))
    assert first.current.handoff_public_key not in file(third, "decode").handoff_clients
    assert [each.number for each in third.believed] == [2, 3, 4]


def test_a_rotation_makes_new_secrets_and_keeps_the_prepared_ones() -> None:
    first = new()
    second = first.rotated(now=NOW, days=10)
    assert (second.cluster, second.last, second.current) == (first.cluster, first.current, first.next)
    secrets = [
        secret
        for each in second.believed
        for secret in (each.handoff_secret_key, each.api_key, each.admin_key, each.workers.private_key)
    ]
    assert len(set(secrets)) == len(secrets)


def test_handoff_keys_are_those_of_zeromq() -> None:
    """The public half, as libzmq derives it from the secret one."""
    generation = new().current
    public = zmq.curve_public(z85.encode(bytes.fromhex(generation.handoff_secret_key)))
    assert z85.decode(public).hex() == generation.handoff_public_key


def test_what_certificates_say() -> None:
    keys = file(new(), "decode")
    shown = certificate(keys.certificate)
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["worker.moerelay"]
    assert not shown.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert shown.not_valid_before_utc == NOW - timedelta(hours=1)
    assert keys.expires == "2030-01-11"
    key = shown.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    authority = certificate(keys.trusted[0]).extensions.get_extension_for_class(x509.BasicConstraints)
    assert (authority.value.ca, authority.value.path_length, authority.critical) == (True, 0, True)
