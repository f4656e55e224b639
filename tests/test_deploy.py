"""What is in deploy/: a systemd unit that starts the daemon, in a sandbox that it can bear."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from ramakv.commands.serve import _WATCHDOG_SPARE_SECONDS
from ramakv.config import Config
from ramakv.config_file import CONFIG_PATH_VARIABLE, DEFAULT_CONFIG_PATH
from tests.daemons import running_daemon

ROOT = Path(__file__).parent.parent
UNIT = ROOT / "deploy" / "ramakv.service"

EXPOSURE_MAX = 20
"""In tenths, as systemd-analyze counts: it calls up to 2.0 fine."""


def settings() -> dict[str, list[str]]:
    """All settings of the unit; one that is given twice adds up."""
    found = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            name, equals, value = line.partition("=")
            assert equals, line
            found[name].append(value)
    return found


def one(name: str) -> str:
    (value,) = settings()[name]
    return value


def test_it_starts_the_daemon_and_reloads_it_with_sighup() -> None:
    command, *arguments = one("ExecStart").split()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert command == "/opt/ramakv/bin/ramakv"
    assert scripts[Path(command).name] == "ramakv.cli:main"
    assert arguments == ["serve"]
    assert one("ExecReload") == "/bin/kill -HUP $MAINPID"
    assert one("WantedBy") == "multi-user.target"


def test_a_stop_has_the_time_that_draining_may_take() -> None:
    most = 2 * Config().limits.drain_timeout_seconds + _WATCHDOG_SPARE_SECONDS
    assert most < float(one("TimeoutStopSec")) < 2 * most


def test_it_is_restarted_after_a_crash_and_not_after_a_mistake() -> None:
    assert one("Restart") == "on-failure"
    assert one("RestartPreventExitStatus") == "2"
    assert int(one("StartLimitBurst")) * float(one("RestartSec")) < int(
        one("StartLimitIntervalSec")
    ), "else it would be tried for ever"


def test_its_folders_are_those_of_the_configuration() -> None:
    state = Path("/var/lib") / one("StateDirectory")
    assert Path(Config().session_store_path).parent == state
    assert one("WorkingDirectory") == "%S/" + one("StateDirectory")
    assert one("Environment") == "XDG_STATE_HOME=%S"
    assert one("StateDirectoryMode") == "0700"
    assert one("UMask") == "0077"
    assert CONFIG_PATH_VARIABLE not in UNIT.read_text()
    folder = str(Path(DEFAULT_CONFIG_PATH).parent)
    tmpfiles = (ROOT / "deploy" / "ramakv.tmpfiles").read_text()
    assert f"\nd {folder} 0750 root {one('Group')} -\n" in tmpfiles
    sysusers = (ROOT / "deploy" / "ramakv.sysusers").read_text()
    assert re.search(rf'^u {one("User")} - "[^"]+" {state}$', sysusers, re.MULTILINE)


def test_it_can_open_what_its_connections_need() -> None:
    assert int(one("LimitNOFILE")) > 2 * Config().limits.connections_max
    assert one("LimitCORE") == "0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("AmbientCapabilities", ""),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
        ("PrivateDevices", "yes"),
        ("ProtectKernelModules", "yes"),
        ("ProtectKernelTunables", "yes"),
        ("ProtectControlGroups", "yes"),
        ("ProtectProc", "invisible"),
        ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX"),
        ("RestrictNamespaces", "yes"),
        ("RestrictSUIDSGID", "yes"),
        ("LockPersonality", "yes"),
        ("MemoryDenyWriteExecute", "yes"),
        ("SystemCallArchitectures", "native"),
    ],
)
def test_it_is_shut_in(name: str, value: str) -> None:
    assert one(name) == value


def test_it_may_make_the_calls_of_a_service_only() -> None:
    assert settings()["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]


# PR_SET_MDWE, which a kernel before 6.3 does not know, is what MemoryDenyWriteExecute asks for.
NO_NEW_CODE = """
import ctypes, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0:
    print("cannot", file=sys.stderr)
import os
os.execv(sys.executable, [sys.executable, "-m", "ramakv", *sys.argv[1:]])
"""


def test_the_daemon_bears_that_no_memory_becomes_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        assert command[1:3] == ["-m", "ramakv"]
        return started([command[0], "-c", NO_NEW_CODE, *command[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with running_daemon(tmp_path) as daemon:
        if daemon.log.read_text().startswith("cannot"):
            pytest.skip("this kernel cannot deny it")
        assert daemon.turn_end("s", "h-a")["ok"]
        assert daemon.send("turn_start", "s")["data"]["prefetch_sent"]
        assert daemon.stop() == 0


# What systemd itself says


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a command that exists."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace(one("ExecStart").split()[0], sys.executable))
    return path


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not here")
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.split()[1]) < 250:
        pytest.skip("this systemd-analyze is too old for --offline")
    command = [tool, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_systemd_finds_nothing_wrong_with_it(unit: Path) -> None:
    done = analyze("verify", "--man=no", unit)
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr


def test_systemd_finds_it_little_exposed(unit: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", unit)
    assert done.returncode == 0, done.stdout + done.stderr


# What is handed on


def test_the_source_archive_has_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    deployed = {f"deploy/ramakv.{kind}" for kind in ("service", "sysusers", "tmpfiles")}
    assert names >= {*deployed, "SECURITY.md", "config.toml", "LICENSE"}
