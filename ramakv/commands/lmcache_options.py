"""What the commands of `ramakv lmcache` share. Imports click alone, as those do."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ramakv.lmcache.operating import LMCacheOperator

    Call = Callable[[LMCacheOperator], Awaitable[Any]]

TIMEOUT_SECONDS = 15.0  # a scheduler waits 10 s for a hung worker before it says so
TIMEOUT_SECONDS_MAX = 3600.0


def _timeout(_: click.Context, __: click.Parameter, value: float) -> float:
    if not 0 < value <= TIMEOUT_SECONDS_MAX:
        raise click.BadParameter(
            f"expected seconds above 0, up to {TIMEOUT_SECONDS_MAX:g}; got {value:g}"
        )
    return value


_COMMON_OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--url", "urls"],
        multiple=True,
        metavar="URL",
        help="Base address of one target; may be repeated. Default: the scheduler at "
        "http://127.0.0.1:6999, and the workers found on the ports after it.",
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    click.Option(
        ["--timeout", "timeout_seconds"],
        type=float,
        default=TIMEOUT_SECONDS,
        show_default=True,
        callback=_timeout,
        metavar="S",
        help="Seconds to wait for each answer.",
    ),
]


def _hashes(_: click.Context, __: click.Parameter, hashes: tuple[str, ...]) -> tuple[str, ...]:
    """Take hashes that begin with a minus, as half of LMCache's do, and no unknown options."""
    for text in hashes:
        if text.startswith("-") and not set(text[1:].lower()) <= set("0123456789abcdef"):
            raise click.BadParameter(f"no such option, and no hash: {text!r}")
        if text in ("", "-"):
            raise click.BadParameter("a hash must not be empty")
    return hashes


hashes_argument = click.argument(
    "hashes", metavar="HASH...", callback=_hashes, nargs=-1, required=True
)
names_argument = click.argument("names", metavar="[NAME...]", nargs=-1)
location_option = click.option(
    "--location",
    "locations",
    multiple=True,
    metavar="L",
    help="Storage backend, such as LocalCPUBackend; may be repeated. Default: all.",
)
yes_option = click.option("--yes", is_flag=True, help="Do it, whatever it can break.")


def asking(
    group: click.Group, name: str | None = None, *, memory: bool = False
) -> Callable[[Callable[..., Call]], click.Command]:
    """Make a command of a function that returns what to ask; `memory`: of the first target only."""

    def decorate(plan: Callable[..., Call]) -> click.Command:
        def ask(urls: Sequence[str], as_json: bool, timeout_seconds: float, **given: Any) -> None:
            call = plan(**given)
            from ramakv.commands.lmcache import run

            sys.exit(
                run(call, urls, as_json=as_json, timeout_seconds=timeout_seconds, memory=memory)
            )

        command = click.Command(
            name or plan.__name__,
            callback=ask,
            help=plan.__doc__,
            params=[*reversed(getattr(plan, "__click_params__", [])), *_COMMON_OPTIONS],
            # Half of all hashes begin with a minus; _hashes refuses what is none.
            context_settings={"ignore_unknown_options": memory},
        )
        group.add_command(command)
        return command

    return decorate


def actions(*names: str) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Take one of these words as the command's `action`."""
    return click.argument("action", metavar="|".join(names), type=click.Choice(names))


def require_yes(yes: bool, danger: str) -> None:
    """Without --yes, say what can break, and end with exit code 2 before anything is sent."""
    if not yes:
        click.echo(f"ramakv: {danger}\nramakv: nothing was sent; --yes sends it", err=True)
        sys.exit(2)


def parse_setting(text: str) -> tuple[str, Any]:
    """Take NAME=VALUE apart; what is not JSON is text."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise click.BadParameter(f"expected NAME=VALUE, got {text!r}")
    import msgspec

    try:
        return name, msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return name, value
