"""Files that hold secrets: read only where nobody else on the machine could have read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ramakv.errors import ConfigError

PRIVATE_BYTES_MAX = 1024 * 1024

_OTHERS = 0o077
_SYSTEMD_OTHERS = 0o037
"""systemd lets a service read its credentials by an ACL, which shows as the group's read bit."""


def read_private(path: Path, key: str) -> bytes:
    """Read a file that only this user, or root, may own and read.

    Raises ConfigError, which names the configuration's `key`, where the file cannot be read, is
    not a regular file, belongs to somebody else, or is open to others.
    """
    try:
        # Nonblocking, because opening a pipe that nobody writes to would wait for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _refuse_public(os.fstat(file.fileno()), path, key)
            content = file.read(PRIVATE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    if len(content) > PRIVATE_BYTES_MAX:
        raise ConfigError(f"{key}: {path} is over {PRIVATE_BYTES_MAX} bytes; is it the right file?")
    return content


def _refuse_public(status: os.stat_result, path: Path, key: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{key}: {path} is not a regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{key}: {path} belongs to another user (uid {status.st_uid}); "
            f"run: chown {os.geteuid()} {path}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & (_SYSTEMD_OTHERS if _is_credential(path) else _OTHERS):
        raise ConfigError(
            f"{key}: {path} is open to others (mode {mode:04o}); run: chmod 600 {path}"
        )


def _is_credential(path: Path) -> bool:
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return bool(folder) and path.parent == Path(folder or "")
