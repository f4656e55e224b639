"""What is handed on: wheel, container, Kubernetes example, completion.

`make package` goes further: it installs and runs wheel and sdist.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ramakv.config import Config
from ramakv.config_file import load_config

ROOT = Path(__file__).parent.parent
RAMAKV = Path(sys.executable).parent / "ramakv"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as found:
        packed = {name for name in found.namelist() if ".dist-info/" not in name}
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ramakv").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == files | {"ramakv/config.toml"}
    assert "ramakv/py.typed" in packed


def test_what_runs_is_pinned_as_everything_is() -> None:
    def pins(name: str) -> set[str]:
        text = (ROOT / "requirements" / name).read_text()
        return set(re.findall(r"^([a-z0-9-]+==\S+)", text, flags=re.MULTILINE))

    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", each)[0] for each in needed}
    assert pins("run.txt") | pins("build.txt") <= pins("lock.txt")
    assert names <= {pin.partition("==")[0] for pin in pins("run.txt")}
    assert not any(pin.startswith(("pytest", "mypy")) for pin in pins("run.txt"))


# The container


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Containerfile").read_text()
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line]


def last(name: str) -> str:
    return [rest for found, rest in instructions() if found == name][-1]


def test_the_container_is_pinned_not_root_and_looks_after_its_health() -> None:
    for name, rest in instructions():
        if name == "FROM":
            assert re.fullmatch(r"python:3\.\d+-slim-\w+( AS \w+)?", rest)
    user = last("USER")
    assert user == "6998:6998"
    assert json.loads(last("ENTRYPOINT")) + json.loads(last("CMD")) == ["ramakv", "serve"]
    assert last("STOPSIGNAL") == "SIGTERM"
    ports = {Config().listen_addr, Config().admin.listen_addr}
    assert set(last("EXPOSE").split()) == {address.rpartition(":")[2] for address in ports}
    assert f"http://{Config().admin.listen_addr}/livez" in last("HEALTHCHECK")
    assert last("WORKDIR") == last("VOLUME") == str(Path(Config().session_store_path).parent)


def test_everything_that_the_container_copies_is_let_in() -> None:
    copied = [
        part
        for name, rest in instructions()
        if name == "COPY" and not rest.startswith("--from")
        for part in rest.split()[:-1]
    ]
    let_in = (ROOT / ".containerignore").read_text().splitlines()
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"!{path.split('/')[0]}" in let_in, path


def test_hadolint_finds_nothing_where_it_is_installed() -> None:
    tool = shutil.which("hadolint", path=f"{ROOT / '.venv-package' / 'bin'}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("hadolint is not here; make package brings it")
    done = subprocess.run(
        [tool, str(ROOT / "Containerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


# Kubernetes


def objects() -> dict[str, Any]:
    found = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "ramakv.yaml").read_text())
    return {each["kind"]: each for each in found}


def sidecar() -> Any:
    (container,) = objects()["StatefulSet"]["spec"]["template"]["spec"]["initContainers"]
    return container


def test_the_sidecars_configuration_starts_with_the_token_of_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(objects()["ConfigMap"]["data"]["config.toml"])
    environment = {
        each["name"]: objects()["Secret"]["stringData"][each["valueFrom"]["secretKeyRef"]["key"]]
        for each in sidecar()["env"]
    }
    config = load_config(str(path), environment)
    ports = {port["name"]: port["containerPort"] for port in sidecar()["ports"]}
    assert config.listen_addr == f"0.0.0.0:{ports['events']}"
    assert config.admin.listen_addr == f"0.0.0.0:{ports['admin']}"
    assert config.auth_token
    mounts = [mount["mountPath"] for mount in sidecar()["volumeMounts"]]
    assert str(config.store_path.parent) in mounts
    assert msgspec.structs.replace(config, auth_token="") != Config()


def test_the_sidecar_is_probed_where_it_answers_and_has_the_time_to_stop() -> None:
    probed = {name: sidecar()[name]["httpGet"] for name in sidecar() if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probed.items()} == {
        "startupProbe": "/readyz",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }
    assert {probe["port"] for probe in probed.values()} == {"admin"}
    pod = objects()["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 2 * Config().limits.drain_timeout_seconds + 5
    security = sidecar()["securityContext"]
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == last("USER")


def test_one_service_leads_to_the_pod() -> None:
    wanted = objects()["Service"]["spec"]["selector"]
    stateful_set = objects()["StatefulSet"]["spec"]
    assert stateful_set["template"]["metadata"]["labels"] == wanted
    assert stateful_set["selector"]["matchLabels"] == wanted
    assert stateful_set["replicas"] == 1, "one database, one owner"


# Completion


def complete(shell: str, words: str, number: int) -> list[str]:
    environment = {
        **os.environ,
        "_RAMAKV_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(number),
    }
    done = subprocess.run([RAMAKV], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_and_options_are_completed() -> None:
    assert complete("bash", "ramakv ser", 1) == ["plain,serve"]
    assert "plain,show" in complete("bash", "ramakv config ", 2)
    assert "plain,--backend" in complete("bash", "ramakv serve --b", 2)
    assert complete("bash", "ramakv serve --backend emb", 3) == ["plain,embedded"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shells_script_is_one_that_it_can_read(shell: str, tmp_path: Path) -> None:
    done = subprocess.run([RAMAKV, "completion", shell], capture_output=True, text=True, check=True)
    assert f"_RAMAKV_COMPLETE={shell}_complete" in done.stdout
    if (tool := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not here")
    script = tmp_path / "script"
    script.write_text(done.stdout)
    subprocess.run([tool, "-n", script], check=True, timeout=30)
