"""`ramakv openapi`: what both listeners take and answer, for tools."""

from __future__ import annotations

import json

import click

from ramakv.openapi import document


def run() -> int:
    """Print the document, a line for each key, so that two versions can be compared."""
    click.echo(json.dumps(document(), indent=2, ensure_ascii=False))
    return 0
