"""The files under SQLite: a VFS that lets single reads, writes and syncs fail, or the power.

It is SQLite's own VFS with a few functions replaced, registered as the default, so that the store
opens its database the way it always does. What was synced of each file is remembered: after a
power failure that is all there is.
"""

from __future__ import annotations

import ctypes
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

OK = sqlite3.SQLITE_OK
_READ = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)
_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))


_ORIGINAL = "unix"
"""Name of the VFS that nothing breaks."""


@contextmanager
def looking_at(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database as somebody who only looks, and who meets no faults."""
    database = sqlite3.connect(f"file:{path}?mode=ro&vfs={_ORIGINAL}", uri=True)
    try:
        yield database
    finally:
        database.close()


class _IoMethods(ctypes.Structure):
    """sqlite3_io_methods, as far as it is touched; the rest is copied with it."""

    _fields_ = (
        ("version", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("truncate", c_void_p),
        ("sync", c_void_p),
        ("rest", c_void_p * 13),
    )


class _Vfs(ctypes.Structure):
    """sqlite3_vfs, likewise."""

    _fields_ = (
        ("version", c_int),
        ("file_bytes", c_int),
        ("path_chars_max", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("app_data", c_void_p),
        ("open", c_void_p),
        ("rest", c_void_p * 14),
    )


class FileFault(Exception):  # noqa: N818 - it is thrown into SQLite, which calls it a code
    """One operation on a file fails with this result code of SQLite."""

    def __init__(self, code: int, *, bytes_written: int = 0) -> None:
        super().__init__(code)
        self.code = code
        self.bytes_written = bytes_written


class Files:
    """What SQLite does to its files, and what of it would survive a power failure."""

    def __init__(self, reach: Callable[[str], None]) -> None:
        self._reach = reach
        self._paths: dict[int, Path] = {}
        self._synced: dict[Path, bytes] = {}
        self._methods: dict[int, _IoMethods] = {}
        self._kept: list[Any] = []  # callbacks must outlive every file that has them

    def after_power_failure(self, path: Path) -> bytes | None:
        """Return what is left of a file; None: nothing."""
        return self._synced.get(path) if path.exists() else None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have every database opened in the meantime use these files.

        Raises OSError where Python's SQLite cannot be reached.
        """
        library = ctypes.CDLL(_library())
        library.sqlite3_vfs_find.restype = POINTER(_Vfs)
        original = library.sqlite3_vfs_find(_ORIGINAL.encode()).contents
        vfs = _Vfs.from_buffer_copy(original)
        vfs.name = b"faulty"
        self._open_original = _OPEN(original.open)
        vfs.open = self._callback(_OPEN, self._open)
        library.sqlite3_vfs_register(ctypes.byref(vfs), 1)
        try:
            yield
        finally:
            library.sqlite3_vfs_unregister(ctypes.byref(vfs))

    def _open(self, vfs: int, name: int | None, file: int, flags: int, out: Any) -> int:
        if (code := self._meet("file.open")) is not None:
            ctypes.cast(file, POINTER(c_void_p))[0] = None  # there is nothing to close
            return code.code
        result: int = self._open_original(vfs, name, file, flags, out)
        methods = ctypes.cast(file, POINTER(c_void_p))
        if result == OK and methods[0]:
            methods[0] = ctypes.addressof(self._replaced(methods[0]))
            self._paths[file] = Path(ctypes.string_at(name).decode()) if name else Path()
        return result

    def _replaced(self, address: int) -> _IoMethods:
        """Return a table of methods like the one there, with ours in it."""
        if address in self._methods:
            return self._methods[address]
        original = _IoMethods.from_address(address)
        ours = _IoMethods.from_buffer_copy(original)
        read, write = _READ(original.read), _WRITE(original.write)
        truncate, sync = _TRUNCATE(original.truncate), _SYNC(original.sync)

        def do_read(file: int, data: int, count: int, start: int) -> int:
            fault = self._meet("file.read")
            return fault.code if fault else read(file, data, count, start)

        def do_write(file: int, data: int, count: int, start: int) -> int:
            fault = self._meet("file.write")
            if fault is None:
                done: int = write(file, data, count, start)
                return done
            if fault.bytes_written:
                write(file, data, min(count, fault.bytes_written), start)
            return fault.code

        def do_truncate(file: int, size: int) -> int:
            fault = self._meet("file.truncate")
            return fault.code if fault else truncate(file, size)

        def do_sync(file: int, flags: int) -> int:
            if fault := self._meet("file.sync"):
                return fault.code
            result: int = sync(file, flags)
            path = self._paths[file]
            if result == OK and path.is_file():
                self._synced[path] = path.read_bytes()
            return result

        ours.read = self._callback(_READ, do_read)
        ours.write = self._callback(_WRITE, do_write)
        ours.truncate = self._callback(_TRUNCATE, do_truncate)
        ours.sync = self._callback(_SYNC, do_sync)
        self._methods[address] = ours
        return ours

    def _meet(self, point: str) -> FileFault | None:
        try:
            self._reach(point)
        except FileFault as fault:
            return fault
        return None

    def _callback(self, kind: Any, function: Callable[..., int]) -> int:
        callback = kind(function)
        self._kept.append(callback)
        return ctypes.cast(callback, c_void_p).value or 0


def _library() -> str:
    """Find the library that Python's sqlite3 module itself uses."""
    found = re.search(r"\S*/libsqlite3\.so\S*", Path("/proc/self/maps").read_text())
    if found is None:
        raise OSError("Python's SQLite is no shared library; its files cannot be watched")
    return found[0]
