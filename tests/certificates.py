"""Certificates for tests, from a CA that lives as long as a test."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import trustme

from ramakv.config import Tls
from ramakv.web.tls import ServerTls


class Certificates:
    """A CA, and in `folder` its certificate and what it issued last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.certificate_file = folder / "tls.pem"
        self.key_file = folder / "tls.key"
        self.ca.cert_pem.write_to_path(self.ca_file)
        self.issue()

    def issue(self, **options: Any) -> str:
        """Write a new certificate and key, and return the certificate's PEM."""
        made = self.ca.issue_cert("localhost", "127.0.0.1", "::1", **options)
        certificate = made.cert_chain_pems[0].bytes()
        self.certificate_file.write_bytes(certificate)
        self.key_file.write_bytes(made.private_key_pem.bytes())
        self.key_file.chmod(0o600)
        return certificate.decode()

    @property
    def settings(self) -> dict[str, str]:
        return {
            "certificate_file": str(self.certificate_file),
            "key_file": str(self.key_file),
        }

    @property
    def environment(self) -> dict[str, str]:
        return {f"RAMAKV_TLS__{name.upper()}": value for name, value in self.settings.items()}

    def server(self, **settings: Any) -> ServerTls:
        return ServerTls(Tls(**self.settings, **settings))

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)
