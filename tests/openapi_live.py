"""Has schemathesis play everything that docs/openapi.json allows, and does not, to a live daemon.

Started by `make test-openapi`. Not part of the tests, for schemathesis brings forty packages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.daemons import Daemon, free_port

DOCUMENT = Path(__file__).parent.parent / "docs" / "openapi.json"
SETTINGS = Path(__file__).parent / "schemathesis.toml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", required=True, metavar="FILE")
    parser.add_argument("--examples", type=int, default=150, help="at most, of each operation")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        admin = f"127.0.0.1:{free_port()}"
        daemon = Daemon(Path(folder), RAMAKV_ADMIN__LISTEN_ADDR=admin)
        try:
            daemon.start()
            play = partial(_play, given.schemathesis, given.examples)
            failed = play(daemon.url, "--include-path") or play(f"http://{admin}", "--exclude-path")
            if daemon.process is None or daemon.process.poll() is not None:
                sys.exit("the daemon ended")
        finally:
            daemon.kill()
    return failed


def _play(schemathesis: str, examples: int, url: str, which: str) -> int:
    """Play the document to one listener: to the events', or to the other."""
    command = [
        *(schemathesis, "--config-file", str(SETTINGS)),
        *("run", str(DOCUMENT), "--url", url, which, "/event"),
        *("--exclude-path", "/api/stream"),  # it has no end
        *("--max-examples", str(examples), "--seed", "1", "--checks", "all"),
    ]
    return subprocess.run(command, check=False, timeout=900).returncode


if __name__ == "__main__":
    sys.exit(main())
