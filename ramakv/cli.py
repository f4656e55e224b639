"""The commands. What each one does is in `ramakv/commands/`, imported when it runs."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import click

from ramakv import __version__
from ramakv.commands.lmcache_cli import lmcache
from ramakv.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:6998"
DEFAULT_ADMIN_URL = "http://127.0.0.1:6997"

_config_option = click.option(
    "--config",
    "config_path",
    metavar="FILE",
    help="Configuration file. Default: $RAM_A_KV_CONFIG, else /etc/ram-a-kv/config.toml.",
)
_url_option = click.option(
    "--url",
    default=DEFAULT_URL,
    show_default=True,
    metavar="URL",
    help="Base address of the daemon.",
)
_token_option = click.option(
    "--token",
    envvar="RAM_A_KV_AUTH_TOKEN",
    metavar="TOKEN",
    help="Bearer token, where the daemon wants one. [env: RAM_A_KV_AUTH_TOKEN]",
)
_ca_file_option = click.option(
    "--ca-file",
    envvar="RAM_A_KV_CA_FILE",
    metavar="FILE",
    help="PEM file of the CAs to trust at an https address. Default: the system's. "
    "[env: RAM_A_KV_CA_FILE]",
)


class _Group(click.Group):
    """Keeps the order in which commands are defined, and turns ConfigError into exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Order them as a newcomer meets them."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a configuration that cannot be used is one line and exit code 2."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo(f"ramakv: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="ramakv")
def main() -> None:
    """Session-aware coordination of an LLM KV cache.

    \b
    Start here:
      ramakv demo                     see what it does, in a screenful
      ramakv serve                    run the daemon
      ramakv event health             ask a running daemon

    Exit codes: 0 done, 1 failed, 2 usage or configuration.
    """


@main.command()
@_config_option
@click.option(
    "--backend",
    type=click.Choice(["lmcache", "embedded", "noop"]),
    help="Use this backend, whatever the configuration says.",
)
@click.option(
    "--listen",
    metavar="ADDR",
    help="Listen here: host:port, [ipv6]:port or unix:/path.",
)
def serve(config_path: str | None, backend: str | None, listen: str | None) -> None:
    """Run the daemon in the foreground.

    SIGTERM or SIGINT stops it: what is in flight is answered, and everything
    acknowledged is on disk. A second signal ends it at once. SIGHUP has the TLS
    certificate, its key and auth_token_file read anew.

    Without a configuration file the defaults hold. The environment wins over the
    file: RAMAKV_LISTEN_ADDR, RAMAKV_BACKEND__KIND, RAMAKV_LOG__LEVEL, and so on.
    `ramakv config reference` lists every key.
    """
    gc.disable()  # what a start makes, stays; `run` turns it on when that is there
    from ramakv.commands.serve import run

    overrides: dict[str, Any] = {}
    if backend is not None:
        overrides |= {"backend.kind": backend, "noop_backend": backend == "noop"}
    if listen is not None:
        overrides["listen_addr"] = listen
    sys.exit(run(config_path, overrides))


@main.command()
@click.argument("type_", metavar="TYPE")
@click.option("--session", "session_id", metavar="ID", help="The event's session_id.")
@click.option("--data", metavar="JSON", help="More fields, as a JSON object; @FILE reads a file.")
@_url_option
@_token_option
@_ca_file_option
def event(
    type_: str,
    session_id: str | None,
    data: str | None,
    url: str,
    token: str | None,
    ca_file: str | None,
) -> None:
    """Send one event and print the reply.

    \b
    ramakv event health
    ramakv event turn_end --session s1 \\
        --data '{"kv_transfer_params": {"chunk_hashes": ["h-a", "h-b"]}}'
    ramakv event list_events            what there is
    """
    from ramakv.commands.event import run

    sys.exit(run(type_, session_id, data, url, token, ca_file))


@main.command()
@click.argument("session_id", metavar="SESSION")
@_url_option
@click.option(
    "--engine-url",
    metavar="URL",
    help="Base address of LMCache's scheduler. Default: http://127.0.0.1:6999.",
)
@_token_option
@_ca_file_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def chunks(
    session_id: str,
    url: str,
    engine_url: str | None,
    token: str | None,
    ca_file: str | None,
    as_json: bool,
) -> None:
    """Show each chunk of a session and where it lies.

    Asks the daemon for the map and LMCache for the places; a chunk that is hot and on disk
    counts as hot. Some versions of LMCache cannot tell where a chunk lies.
    """
    from ramakv.commands.chunks import run

    sys.exit(run(session_id, url, engine_url, token, ca_file, as_json=as_json))


main.add_command(lmcache)


@main.command()
def demo() -> None:
    """Show in a screenful what the daemon does, and why.

    Starts a daemon with the embedded engine on free ports in a temporary folder.
    """
    from ramakv.commands.demo import run

    sys.exit(run())


@main.command()
@click.argument("trace", type=click.Path(path_type=Path))
@_url_option
@click.option(
    "--engine-url",
    metavar="URL",
    help="Base address of an embedded engine, to store and retrieve as an inference engine "
    "does. Default: none, and no such calls.",
)
@click.option(
    "--speed",
    default="max",
    show_default=True,
    metavar="max|N",
    help="N times as fast as recorded; max: without any wait.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N requests.")
@click.option("--close", is_flag=True, help="Close each session after its last turn.")
@click.option("--json", "json_path", metavar="FILE", help="Write the figures here; - is stdout.")
@_token_option
@_ca_file_option
def replay(
    trace: Path,
    url: str,
    engine_url: str | None,
    speed: str,
    limit: int | None,
    close: bool,
    json_path: str | None,
    token: str | None,
    ca_file: str | None,
) -> None:
    """Drive a daemon with a recorded trace.

    TRACE holds one inference request a line, as JSON, gzipped or not: t (seconds), session,
    turn, in, out (tokens), hashes, and where known dur (seconds) and stop.
    """
    from ramakv.commands.replay import run

    factor = None if speed == "max" else _positive(speed)
    options = {"token": token, "ca_file": ca_file}
    sys.exit(run(trace, url, engine_url, factor, limit, close, json_path, **options))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise click.BadParameter(f"expected max or a number above 0, got {text!r}")
    return value


_admin_url_option = click.option(
    "--url",
    default=DEFAULT_ADMIN_URL,
    show_default=True,
    metavar="URL",
    help="Address for operators: http://host:port, https://host:port or unix:/path.",
)


@main.command()
@_admin_url_option
@click.option(
    "--sessions",
    "count",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="N",
    help="How many sessions to list, those first whose turns ended last.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@_token_option
@_ca_file_option
def residency(url: str, count: int, as_json: bool, token: str | None, ca_file: str | None) -> None:
    """Show whose chunks stay in LMCache's hot tier, and why.

    It asks the listener for operators (admin.listen_addr).
    """
    from ramakv.commands.residency import run

    sys.exit(run(url, token, ca_file, count, as_json=as_json))


@main.command()
@_admin_url_option
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option("--once", is_flag=True, help="Print it once and end.")
@_token_option
@_ca_file_option
def top(url: str, interval: float, once: bool, token: str | None, ca_file: str | None) -> None:
    """Watch a running daemon: sessions, events, LMCache, evictions.

    It asks the listener for operators (admin.listen_addr). Where the output is no terminal it
    is plain text, one picture after the other. Ctrl-C ends it.
    """
    from ramakv.commands.top import run

    sys.exit(run(url, token, ca_file, interval, once=once))


@main.command()
@_config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(config_path: str | None, as_json: bool) -> None:
    """Check configuration, daemon, database and LMCache, and say what to do.

    Changes nothing. Exit code 1 if something is wrong.
    """
    from ramakv.commands.doctor import run

    sys.exit(run(config_path, as_json=as_json))


@main.group()
def config() -> None:
    """Look at the configuration."""


@config.command("show")
@_config_option
def config_show(config_path: str | None) -> None:
    """Print what is in force: file, environment and defaults together."""
    from ramakv.commands.config import show

    sys.exit(show(config_path))


@config.command("check")
@_config_option
def config_check(config_path: str | None) -> None:
    """Say whether the daemon would start with it. Exit code 2 if not."""
    from ramakv.commands.config import check

    sys.exit(check(config_path))


@config.command("reference")
def config_reference() -> None:
    """Print every key with its type, default, bounds and meaning, as Markdown."""
    from ramakv.commands.config_reference import run

    sys.exit(run())


@main.group()
def store() -> None:
    """Look at the database."""


@store.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def store_check(file: Path, as_json: bool) -> None:
    """Check a database's integrity and count what is in it.

    Only reads; a daemon may be using the file meanwhile. Exit code 1 if something is wrong.
    """
    from ramakv.commands.store import check

    sys.exit(check(file, as_json=as_json))


@main.command()
def openapi() -> None:
    """Print the OpenAPI 3.1 document of both listeners, as JSON."""
    from ramakv.commands.openapi import run

    sys.exit(run())


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete ramakv's commands and options.

    \b
    ramakv completion bash > ~/.local/share/bash-completion/completions/ramakv
    ramakv completion zsh  > ~/.zfunc/_ramakv        (a folder in $fpath)
    ramakv completion fish > ~/.config/fish/completions/ramakv.fish
    """
    from ramakv.commands.completion import run

    sys.exit(run(shell, main))


def serve_main() -> None:
    """Run `ram-a-kv`: the daemon, as the Rust daemon's documents start it."""
    main(["serve", *sys.argv[1:]], prog_name="ram-a-kv")
