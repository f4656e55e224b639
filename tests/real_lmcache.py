"""A real LMCache 0.4.4 on a CPU, as a process of its own: its standalone mode, one worker.

It has a mock GPU connector, a CPU tier and a disk tier, and no `/memory/*` routes: those come with
LMCache-Ascend. `make test-lmcache` installs it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.daemons import free_port

READY_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 20.0

# Sizes in GiB. The worker's port is the one after the start.
_CONFIG = """\
chunk_size: {chunk_size}
local_cpu: true
max_local_cpu_size: 0.0625
local_disk: "file://{folder}/disk/"
max_local_disk_size: 0.0625
lmcache_instance_id: "ramakv-test"
internal_api_server_enabled: true
internal_api_server_host: "127.0.0.1"
internal_api_server_port_start: {port_start}
"""


class RealLMCache(NamedTuple):
    """Where it answers, and what it said."""

    url: str
    log: Path


@contextmanager
def running_lmcache(
    python: str, folder: Path, *, chunk_size: int = 256, port: int | None = None
) -> Iterator[RealLMCache]:
    """Start LMCache with this Python, wait until it answers, and stop it afterwards."""
    port = port or free_port()
    (folder / "disk").mkdir(parents=True, exist_ok=True)
    config = folder / "lmcache.yaml"
    config.write_text(_CONFIG.format(folder=folder, chunk_size=chunk_size, port_start=port - 1))
    real = RealLMCache(f"http://127.0.0.1:{port}", folder / "lmcache.log")
    with real.log.open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "lmcache.v1.standalone", "--config", str(config)],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(("LMCACHE", "PYTHON"))},
                "LMCACHE_TRACK_USAGE": "false",  # it would call home
                "HF_HUB_OFFLINE": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, real)
        yield real
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], real: RealLMCache) -> None:
    ends = time.monotonic() + READY_SECONDS_MAX
    with httpx.Client(base_url=real.url, trust_env=False, verify=False, timeout=5.0) as http:
        while time.monotonic() < ends:
            assert process.poll() is None, real.log.read_text(errors="replace")
            try:
                if http.get("/lmc_version").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
    raise AssertionError(f"not ready: {real.log.read_text(errors='replace')}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS_MAX)
