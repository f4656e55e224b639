"""Who may come in: the bearer token and the certificate, both of which can be read anew."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable
from hashlib import sha256

import structlog
import trio

from ramakv.config import Config
from ramakv.config_file import read_token
from ramakv.errors import ConfigError
from ramakv.web.tls import ServerTls

log = structlog.get_logger("ramakv.web")


class Bearer:
    """The token that every request must carry; an empty one asks for none."""

    def __init__(self, token: str) -> None:
        self.replace(token)

    def replace(self, token: str) -> None:
        """Ask for another token from the next request on."""
        self._digest = _digest(token.encode()) if token else None

    @property
    def is_set(self) -> bool:
        """Whether a token is asked for."""
        return self._digest is not None

    def admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request's headers (names in lower case) carry the token, once."""
        if self._digest is None:
            return True
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        # Digests are all of one length, so the time says nothing about the token, nor its length.
        return scheme.lower() == b"bearer" and hmac.compare_digest(
            _digest(token.strip(b" ")), self._digest
        )


class Access:
    """The listeners' token and certificate, as they are in force."""

    def __init__(self, config: Config) -> None:
        """Load the certificate where there is one. Raises ConfigError."""
        self._config = config
        self.bearer = Bearer(config.auth_token)
        uses_tls = config.is_https or (config.admin.listen_addr and config.admin_is_https)
        self.tls = ServerTls(config.tls) if uses_tls else None
        self._warn()

    async def reload(self) -> None:
        """Read the files anew, each for itself; one that cannot be used changes nothing."""
        if self.tls is None and not self._config.auth_token_file:
            log.info("nothing to reload: neither tls.certificate_file nor auth_token_file is set")
            return
        if self._config.auth_token_file:
            try:
                self.bearer.replace(await trio.to_thread.run_sync(read_token, self._config))
                log.info("reloaded the token", path=self._config.auth_token_file)
            except ConfigError as error:
                log.error("the token stays as it was", cause=str(error))
        if self.tls is not None:
            try:
                await trio.to_thread.run_sync(self.tls.reload)
                log.info("reloaded the certificate", valid_until=self.tls.certificate.expires)
                self._warn()
            except ConfigError as error:
                log.error("the certificate stays as it was", cause=str(error))

    def _warn(self) -> None:
        if self.tls is not None and (problem := self.tls.certificate.problem(time.time())):
            log.warning("clients will refuse to connect", cause=problem)


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()
