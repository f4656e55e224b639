"""`ramakv completion`: click's own completion, for a shell to keep."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_RAMAKV_COMPLETE"
"""Where a shell's script asks `ramakv` for what could come next."""


def run(shell: str, command: click.Command) -> int:
    """Print the script."""
    kind = get_completion_class(shell)
    assert kind is not None, shell
    # source_vars and the template, not source(): that runs bash to ask for its version.
    completer = kind(command, {}, "ramakv", VARIABLE)
    click.echo(completer.source_template % completer.source_vars())
    return 0
