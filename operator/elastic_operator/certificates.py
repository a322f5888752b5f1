"""The certificates of a job's own etcd: mutual TLS, so that only the job's pods and the operator can connect.

Each job has its own certificate authority. The authority's key is not stored: it is derived from a secret of the
operator and the job's UID. So the operator can issue certificates for any job at any time, also after a restart, and
reads no Secret of a user. etcd and its clients use the same certificate, which both sides verify.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import ssl
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from torchelastic.store.etcd_process import AUTHORITY, CERTIFICATE, KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SECRET_BYTES: Final = 32
"""Size of the operator's secret."""

_CURVE: Final = ec.SECP256R1()
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Number of the curve's private keys plus one; SEC 2, section 2.4.2."""

_CLOCK_SKEW: Final = dt.timedelta(hours=1)
"""Clocks may be behind by this time."""

_LOCAL_LIFETIME: Final = dt.timedelta(days=3650)
"""No run on one machine lasts that long."""

_BEGIN: Final = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
_NO_END: Final = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)
"""The end of a certificate without an end; RFC 5280, section 4.1.2.5."""


class JobAuthority:
    """The certificate authority of one job.

    Args:
        secret: the operator's secret, :data:`SECRET_BYTES` random bytes.
        uid: the UID of the job.
    """

    def __init__(self, secret: bytes, uid: str) -> None:
        # 16 bytes more than the curve's order make the result uniform; FIPS 186-5, appendix A.2.1.
        derived = HKDF(hashes.SHA256(), length=48, salt=None, info=f"etcd of {uid}".encode()).derive(secret)
        self._key = ec.derive_private_key(int.from_bytes(derived) % (_ORDER - 1) + 1, _CURVE)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"etcd of {uid}")])
        self._certificate = self._sign(
            self._name, self._key.public_key(), _BEGIN, _NO_END, [(x509.BasicConstraints(ca=True, path_length=0), True)]
        )

    def issue(self, hosts: Iterable[str], lifetime: dt.timedelta) -> dict[str, bytes]:
        """Issue a certificate for etcd and its clients.

        Args:
            hosts: the names and IP addresses at which clients reach etcd; empty for a client.
            lifetime: how long the certificate is valid.

        Returns:
            the PEM files ``ca.crt``, ``tls.crt`` and ``tls.key``.
        """
        key, now = ec.generate_private_key(_CURVE), dt.datetime.now(dt.UTC)
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        extensions: list[tuple[x509.ExtensionType, bool]] = [(usages, False)]
        if names := [_general_name(host) for host in hosts]:
            extensions.append((x509.SubjectAlternativeName(names), False))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd")])
        certificate = self._sign(subject, key.public_key(), now - _CLOCK_SKEW, now + lifetime, extensions)
        return {
            AUTHORITY: self._certificate.public_bytes(serialization.Encoding.PEM),
            CERTIFICATE: certificate.public_bytes(serialization.Encoding.PEM),
            KEY: key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        }

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        begin: dt.datetime,
        end: dt.datetime,
        extensions: Iterable[tuple[x509.ExtensionType, bool]],
    ) -> x509.Certificate:
        is_authority = subject == self._name
        usage = x509.KeyUsage(
            digital_signature=not is_authority,
            key_cert_sign=is_authority,
            **dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False),
            **dict.fromkeys(("crl_sign", "encipher_only", "decipher_only"), False),
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def client_context(files: Mapping[str, bytes]) -> ssl.SSLContext:
    """Return a context for a client of etcd.

    Args:
        files: the PEM files ``ca.crt``, and ``tls.crt`` and ``tls.key`` for client authentication; without ``ca.crt``,
            the system's authorities are trusted.

    Raises:
        ValueError: a file cannot be used; the message begins with its name.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if authority := files.get(AUTHORITY):
            context.load_verify_locations(cadata=authority.decode("ascii", "ignore"))
        else:
            context.load_default_certs()
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{AUTHORITY} that holds no certificate in PEM form") from None
    if files.get(CERTIFICATE) or files.get(KEY):
        _load_pair(context, files.get(CERTIFICATE, b"") + b"\n" + files.get(KEY, b""))
    return context


def write_certificates(folder: Path, uid: str, host: str = "127.0.0.1") -> ssl.SSLContext:
    """Create the certificates of an etcd that this machine runs, as files that only this user can read.

    Returns:
        the context for a client.
    """
    files = JobAuthority(os.urandom(SECRET_BYTES), uid).issue((host,), _LOCAL_LIFETIME)
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, content in files.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(content)
    return client_context(files)


def _load_pair(context: ssl.SSLContext, pair: bytes) -> None:
    """Load a certificate and its key, which ssl reads only from a file: one in memory, which no other process sees."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pair)
        # Without this empty password, OpenSSL would ask on the terminal for the password of an encrypted key.
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    except (OSError, ValueError):
        raise ValueError(f"{CERTIFICATE} and a {KEY} that are not a pair in PEM form without a password") from None
    finally:
        os.close(descriptor)
