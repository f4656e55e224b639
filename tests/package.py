"""Builds wheel and sdist, installs each somewhere else, and has each take an event there.

Started by `make package`; it needs the package index, as `make install` does. The artifacts stay in
dist/.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.daemons import free_port

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
READY_SECONDS_MAX = 60.0
EVENT = '{"kv_transfer_params": {"chunk_hashes": ["h-a", "h-b"]}}'
TESTS = ("test_refcounts.py", "test_config.py", "test_openapi.py", "test_client_settings.py")
"""Some of those in the sdist: it holds them all, and what they need."""


def main() -> int:
    for old in DIST.glob("ramakv-*"):
        old.unlink()
    _run(sys.executable, "-m", "hatchling", "build", "-d", str(DIST), cwd=ROOT)
    (wheel,) = DIST.glob("*.whl")
    (sdist,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="ramakv-package-") as folder:
        _try(wheel, Path(folder) / "wheel")
        print(f"{wheel.name}: installed, served, took an event")
        source = _unpack(sdist, Path(folder) / "sdist")
        tests = [str(Path("tests") / name) for name in TESTS]
        _run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=source)
        _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=source)
        (again,) = (source / "dist").glob("*.whl")
        _try(again, Path(folder) / "from-sdist")
        print(f"{sdist.name}: its tests ran; built, installed, served, took an event")
    return 0


def _unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def _try(wheel: Path, folder: Path) -> None:
    """Install a wheel with what the lock pins, and use it from another folder."""
    folder.mkdir()
    binaries = folder / "venv" / "bin"
    pip = (str(binaries / "pip"), "--quiet", "--disable-pip-version-check", "install")
    _run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
    lock = ROOT / "requirements" / "run.txt"
    _run(*pip, "--require-hashes", "-r", str(lock), cwd=folder)
    _run(*pip, "--no-deps", str(wheel), cwd=folder)
    _run(str(binaries / "pip"), "check", cwd=folder)
    _run(str(binaries / "python"), "-c", "from ramakv.client import Client", cwd=folder)
    _serve_and_send(binaries, folder)


def _serve_and_send(binaries: Path, folder: Path) -> None:
    port = free_port()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAM")},
        "RAMAKV_LISTEN_ADDR": f"127.0.0.1:{port}",
        "RAMAKV_ADMIN__LISTEN_ADDR": "127.0.0.1:0",
        "RAMAKV_BACKEND__KIND": "noop",
        "RAMAKV_SESSION_STORE_PATH": str(folder / "sessions.db"),
    }
    ramakv = str(binaries / "ramakv")
    daemon = subprocess.Popen([ramakv, "serve"], env=environment, cwd=folder)
    try:
        to = ("--url", f"http://127.0.0.1:{port}")
        ends = time.monotonic() + READY_SECONDS_MAX
        while subprocess.run([ramakv, "event", "health", *to], capture_output=True).returncode:
            assert daemon.poll() is None, "the daemon ended"
            assert time.monotonic() < ends, "the daemon did not answer"
            time.sleep(0.1)
        _run(ramakv, "event", "turn_end", "--session", "s", "--data", EVENT, *to, cwd=folder)
        daemon.terminate()
        assert daemon.wait(30) == 0
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait(30)


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, timeout=600)


if __name__ == "__main__":
    sys.exit(main())
