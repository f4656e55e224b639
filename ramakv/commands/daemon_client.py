"""How the commands reach a daemon: over HTTP, HTTPS or a unix socket, with its token and CA."""

from __future__ import annotations

import ssl

import httpx

from ramakv.errors import ConfigError

TIMEOUT_SECONDS = 30.0


def open_client(
    url: str, token: str | None, trust: ssl.SSLContext | str | None = None
) -> httpx.Client:
    """Connect to a daemon at `http://host:port`, `https://host:port` or `unix:/path`.

    `trust` is what `trusted` takes, or returned. Raises ConfigError.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if url.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"), verify=trusted(url))
        return httpx.Client(
            transport=transport,
            base_url="http://localhost",
            headers=headers,
            timeout=TIMEOUT_SECONDS,
        )
    return httpx.Client(
        base_url=url,
        headers=headers,
        timeout=TIMEOUT_SECONDS,
        trust_env=False,
        verify=trust if isinstance(trust, ssl.SSLContext) else trusted(url, trust),
    )


def trusted(url: str, ca_file: str | None = None) -> ssl.SSLContext:
    """Return whom a client of this URL trusts: the CAs in `ca_file`, else the system's.

    Raises ConfigError where the file cannot be used.
    """
    if not url.lower().startswith("https:"):
        # Nobody, for there is nobody to trust; and reading the system's CAs takes 30 ms.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # an SSLError is one
        reason = "no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"--ca-file {ca_file}: {reason}") from error


def no_answer(url: str, error: Exception) -> str:
    """Say that a daemon did not answer, and what to look at."""
    hint = "is the daemon running?"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "name the CA of its certificate with --ca-file"
    elif "[SSL" in str(error):
        hint = "does it speak https?"
    return f"no answer from {url}: {error}; {hint}"
