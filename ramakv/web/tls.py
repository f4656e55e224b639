"""The certificate and key of the listeners: loaded, judged, and loaded anew on demand."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

from ramakv.config import Tls, resolve_path
from ramakv.errors import ConfigError
from ramakv.private_files import read_private

ALPN: Final = ("http/1.1",)

_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which the ssl module does not name
_HANDSHAKE_STEPS_MAX: Final = 4  # TLS 1.2 needs three on each side
_OF_ANOTHER: Final = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate that can be used, and until when clients accept it."""

    context: ssl.SSLContext
    valid_from: float
    valid_until: float
    """Seconds since 1970, as `valid_from`."""

    @property
    def expires(self) -> str:
        """When it expires, as people write it."""
        return _day(self.valid_until)

    def problem(self, now: float) -> str | None:
        """Return why clients refuse it at the moment, or None."""
        if now >= self.valid_until:
            return f"the certificate expired on {_day(self.valid_until)}"
        if now < self.valid_from:
            return f"the certificate is not valid before {_day(self.valid_from)}"
        return None


class ServerTls:
    """What new connections get; those that are open keep what they have."""

    def __init__(self, settings: Tls) -> None:
        """Load the certificate. Raises ConfigError."""
        self.handshake_timeout_seconds = settings.handshake_timeout_seconds
        self._settings = settings
        self.certificate = load_certificate(settings)

    def reload(self) -> None:
        """Load the files anew. Raises ConfigError; then the certificate in use stays."""
        self.certificate = load_certificate(self._settings)


def load_certificate(settings: Tls) -> Certificate:
    """Load certificate and key, and see that a client could use them. Raises ConfigError."""
    chain_path, key_path = resolve_path(settings.certificate_file), resolve_path(settings.key_file)
    chain = _read_certificates(chain_path)
    if b" PRIVATE KEY-----" not in read_private(key_path, "tls.key_file"):
        raise ConfigError(f"tls.key_file: {key_path} holds no private key in PEM")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a way to have the server work for nothing
    context.set_alpn_protocols(list(ALPN))

    def refuse_encrypted() -> NoReturn:  # instead of asking at the terminal
        raise ConfigError(
            f"tls.key_file: the key in {key_path} is encrypted, and nobody is asked for a "
            "passphrase; store it without one"
        )

    try:
        context.load_cert_chain(chain_path, key_path, password=refuse_encrypted)
        shown = _shake_hands(context, chain)
    except OSError as error:  # an SSLError is one
        if getattr(error, "reason", None) in _OF_ANOTHER:
            raise ConfigError(
                f"tls: the key in {key_path} does not belong to the certificate in {chain_path}"
            ) from error
        raise ConfigError(
            f"tls: the certificate in {chain_path} with the key in {key_path} cannot be used: "
            f"{getattr(error, 'verify_message', None) or error.strerror or error}"
        ) from error
    return Certificate(
        context,
        ssl.cert_time_to_seconds(str(shown["notBefore"])),
        ssl.cert_time_to_seconds(str(shown["notAfter"])),
    )


def trust_in_own(settings: Tls) -> ssl.SSLContext:
    """Return what a client needs that trusts this very certificate, at any host, at any time."""
    return _trusting(_read_certificates(resolve_path(settings.certificate_file)))


def _read_certificates(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"tls.certificate_file: cannot read {path}: {error.strerror}") from error
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise ConfigError(f"tls.certificate_file: {path} holds no certificate in PEM")
    return text


def _trusting(chain: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    context.load_verify_locations(cadata=chain)
    return context


def _shake_hands(context: ssl.SSLContext, chain: str) -> Mapping[str, object]:
    """Have a client in memory accept the certificate, and return what it was shown.

    Nothing else in the standard library tells when a certificate of one's own expires.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _trusting(chain).wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_HANDSHAKE_STEPS_MAX):
        for end in (client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    shown = client.getpeercert()
    assert shown
    return shown


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
