"""Certificates for the wire tests, made anew for each session."""

from __future__ import annotations

import datetime as dt
import ssl
import warnings
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from service.egress.guard import tls_context

_DAY = dt.timedelta(days=1)


class Authority:
    """A root, an intermediate it signed, and servers signed by either."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root_key, self._root = _make("the root", None, None, is_authority=True)
        self._middle_key, self._middle = _make("the middle", self._root_key, self._root, is_authority=True)
        self._root_file = folder / "root.pem"
        self._root_file.write_bytes(self._root.public_bytes(serialization.Encoding.PEM))

    @property
    def root_file(self) -> Path:
        """The root's certificate."""
        return self._root_file

    def client_context(self) -> ssl.SSLContext:
        """The sender's own context, trusting this root as well."""
        context = tls_context()
        context.load_verify_locations(cafile=self._root_file)
        return context

    def server_context(self, *names: str, expired: bool = False, self_signed: bool = False) -> ssl.SSLContext:
        """A server with a certificate for these names or addresses, signed by the root or by itself."""
        signer = (None, None) if self_signed else (self._root_key, self._root)
        return self._context(*_make(names[0], *signer, names=names, expired=expired))

    def server_without_its_intermediate(self, *names: str) -> ssl.SSLContext:
        """A server whose certificate the intermediate signed, and which does not send the intermediate."""
        return self._context(*_make(names[0], self._middle_key, self._middle, names=names))

    def server_of_names(self, *names: str) -> ssl.SSLContext:
        """A server that shows each name its own certificate, and ends a handshake without a known name."""
        contexts = {name: self.server_context(name) for name in names}
        outer = self.server_context("nobody.test")

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int | None:
            if name not in contexts:
                return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            connection.context = contexts[name]
            return None

        outer.sni_callback = choose
        return outer

    def server_of_tls_1_1(self, *names: str) -> ssl.SSLContext:
        """A server that speaks nothing newer than TLS 1.1."""
        context = self.server_context(*names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        return context

    def _context(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> ssl.SSLContext:
        file = self._folder / f"{certificate.serial_number}.pem"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context


def _make(
    subject: str,
    signer_key: ec.EllipticCurvePrivateKey | None,
    signer: x509.Certificate | None,
    *,
    names: tuple[str, ...] = (),
    expired: bool = False,
    is_authority: bool = False,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(signer.subject if signer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 9 * _DAY)
        .not_valid_after(now - _DAY if expired else now + 9 * _DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False
        )
    return key, builder.sign(signer_key or key, hashes.SHA256())


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)
