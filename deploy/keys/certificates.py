"""X.509 certificates for mutual TLS: authorities, and what they sign. EC keys on P-256, signed with SHA-256."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: Clocks of a cluster differ a little; a certificate counts from before it was made.
_BACKDATED = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its private key, in PEM."""

    certificate: str
    private_key: str


def new_authority(name: str, *, now: datetime, days: int) -> Signed:
    """One that signs itself. No two that are trusted at the same time may have the same name."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(subject, subject, key.public_key(), now, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return _signed(builder.sign(key, hashes.SHA256()), key)


def sign(authority: Signed, name: str, *, server: bool, now: datetime, days: int) -> Signed:
    """A new key and its certificate for the host `name`, to be shown by a server, or by a client."""
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    signer = load_pem_private_key(authority.private_key.encode(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey), "authorities are made above"
    key = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = _builder(_name(name), issuer.subject, key.public_key(), now, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return _signed(builder.sign(signer, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Signed:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Signed(certificate.public_bytes(Encoding.PEM).decode(), private.decode())


def certificate_fingerprint(certificate: str) -> bytes:
    """SHA-256 of it."""
    return x509.load_pem_x509_certificate(certificate.encode()).fingerprint(hashes.SHA256())


def expires(certificate: str) -> str:
    """The day, in UTC: YYYY-MM-DD."""
    end = x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc
    return end.astimezone(UTC).strftime("%Y-%m-%d")
