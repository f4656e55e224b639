"""`ramakv lmcache`: the words on the command line. Imports click alone, so that start-up is quick.

Each command returns what to ask one target; `ramakv/commands/lmcache.py` asks all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ramakv.commands.lmcache_options import (
    actions,
    asking,
    hashes_argument,
    location_option,
    names_argument,
    parse_setting,
    require_yes,
    yes_option,
)

if TYPE_CHECKING:
    from ramakv.commands.lmcache_options import Call
    from ramakv.lmcache.operating import LMCacheOperator

_LOOKUP_DANGER = """\
lookup {action} is not for a live engine: with asynchronous loading, LMCache 0.4.4's scheduler
aborts at close and at create, dry run included; without, a dry run hung its port."""
_CHUNK_SIZE_DANGER = """\
LMCache takes a new chunk_size while it runs, but what was built with the old one keeps it, and
chunk hashes depend on it: what is stored may not be found again."""
_CLEAR_DANGER = """\
cache clear empties the hot tier (LMCache 0.4.4 clears LocalCPUBackend only, and skips what is in
use): whatever is on no other tier must be computed again, for every session."""
_EVICT_DANGER = """\
evict without --location removes the chunks from every tier, copies on remote tiers that other
engines share included. On the disk tier it can hang LMCache 0.4.4's port while a prefetch runs."""


@click.group()
def lmcache() -> None:
    """Ask and operate LMCache: its scheduler and workers, all at once.

    Exit code 0: at least one did what was asked, and the others have no such thing.
    1: none did, or one failed. 2: usage.
    """


@lmcache.command()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST")
@click.option(
    "--port",
    type=click.IntRange(0, 65_000),
    default=6999,
    show_default=True,
    help="The scheduler's; workers are on the next ones. 0: free ones.",
)
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--config", "config_path", metavar="FILE", help="For the section [embedded].")
def serve(host: str, port: int, workers: int, config_path: str | None) -> None:
    """Run the embedded engine alone: it answers as LMCache does, with data of its own."""
    from ramakv.commands.lmcache_serve import run

    sys.exit(run(host, port, workers, config_path))


@lmcache.group()
def conf() -> None:
    """Look at settings, and change them."""


@lmcache.group()
def cache() -> None:
    """Clear the cache; store and retrieve mock tokens."""


@lmcache.group()
def kvcache() -> None:
    """Look at the inference engine's own KV cache."""


@lmcache.group()
def bypass() -> None:
    """Leave a storage backend out of lookups, stores and retrieves; evicts still reach it."""


@asking(lmcache)
def version() -> Call:
    """Show version and commit."""
    from ramakv.commands.lmcache import versions

    return versions


@asking(lmcache)
def info() -> Call:
    """Show what the inference engine tells of itself."""
    return lambda target: target.inference_info()


@asking(lmcache, "inference-version")
def inference_version() -> Call:
    """Show the version of the inference engine. LMCache 0.4.4 always fails at it."""
    return lambda target: target.inference_version()


@asking(lmcache)
def metrics() -> Call:
    """Show LMCache's own metrics, without those of its process."""
    from ramakv.commands import lmcache as asked

    return asked.metrics


@asking(conf, "get")
@names_argument
def conf_get(names: Sequence[str]) -> Call:
    """Show these settings, or all."""
    return lambda target: target.conf(names)


@asking(conf, "set")
@click.argument("settings", metavar="NAME=VALUE...", nargs=-1, required=True)
@yes_option
def conf_set(settings: Sequence[str], yes: bool) -> Call:
    """Change settings, in every process. VALUE is JSON, else text.

    Many settings are read once, at start: a change is then accepted, and without effect.
    """
    values = dict(map(parse_setting, settings))
    if "chunk_size" in values:
        require_yes(yes, _CHUNK_SIZE_DANGER)
    return lambda target: target.conf_update(values)


@asking(lmcache)
@names_argument
def meta(names: Sequence[str]) -> Call:
    """Show metadata of each process, or these fields of it."""

    async def ask(target: LMCacheOperator) -> dict[str, Any]:
        return (await target.meta(names)).attributes

    return ask


@asking(cache, "clear")
@location_option
@yes_option
def cache_clear(locations: Sequence[str], yes: bool) -> Call:
    """Forget what is cached. num_removed is in tokens, not chunks."""
    require_yes(yes, _CLEAR_DANGER)
    return lambda target: target.cache_clear(locations)


@asking(cache, "store")
@click.argument("start", type=click.IntRange(min=0))
@click.argument("end", type=click.IntRange(min=0))
def cache_store(start: int, end: int) -> Call:
    """Store KV for the mock tokens from START up to, not with, END."""
    return lambda target: target.cache_store(start, end)


@asking(cache, "retrieve")
@click.argument("start", type=click.IntRange(min=0))
@click.argument("end", type=click.IntRange(min=0))
def cache_retrieve(start: int, end: int) -> Call:
    """Retrieve KV for the mock tokens from START up to, not with, END."""
    return lambda target: target.cache_retrieve(start, end)


@asking(kvcache, "check")
@click.argument("slots")
@click.option("--chunk-size", type=click.IntRange(min=1), required=True, metavar="N")
@click.option("--layerwise", is_flag=True, help="Layer by layer.")
def kvcache_check(slots: str, chunk_size: int, layerwise: bool) -> Call:
    """Show checksums of SLOTS, such as 0,1,[9,12], N slots each."""
    return lambda target: target.kvcache_check(slots, chunk_size, layerwise=layerwise)


@asking(kvcache, "record-slot")
@click.argument("switch", metavar="[on|off]", type=click.Choice(["on", "off"]), required=False)
def kvcache_record_slot(switch: str | None) -> Call:
    """Switch the logging of slots on or off, or show whether it is on."""
    if switch is None:
        return lambda target: target.kvcache_record_slot()
    return lambda target: target.kvcache_record_slot_set(switch == "on")


@asking(kvcache, "info")
def kvcache_info() -> Call:
    """Show layers, shapes and devices. LMCache up to 0.4.7 answers that it has none."""
    return lambda target: target.kvcache_info()


@asking(lmcache, "load-fs-chunks")
@click.argument("config")
@click.option("--max-chunks", type=click.IntRange(min=0), metavar="N", help="Load at most N.")
@click.option(
    "--max-failed-keys", type=click.IntRange(min=0), metavar="N", help="Name at most N failed keys."
)
def load_fs_chunks(config: str, max_chunks: int | None, max_failed_keys: int | None) -> Call:
    """Load chunk files into the hot tier.

    CONFIG is the path of an LMCache configuration file on LMCache's own host.
    """
    return lambda target: target.load_fs_chunks(
        config, max_chunks=max_chunks, max_failed_keys=max_failed_keys
    )


@asking(lmcache)
@actions("enable", "disable", "status")
def freeze(action: str) -> Call:
    """Store nothing and retrieve from the hot tier only; evicts and clears still work."""
    return {
        "enable": lambda target: target.freeze_enable(),
        "disable": lambda target: target.freeze_disable(),
        "status": lambda target: target.freeze_status(),
    }[action]


@asking(lmcache, "hot-cache")
@actions("enable", "disable", "status")
def hot_cache(action: str) -> Call:
    """Use the hot tier or not; disable empties it first."""
    return {
        "enable": lambda target: target.hot_cache_enable(),
        "disable": lambda target: target.hot_cache_disable(),
        "status": lambda target: target.hot_cache_status(),
    }[action]


@asking(lmcache)
@actions("info", "close", "create", "recreate")
@click.option("--dryrun", is_flag=True, help="With create: only say which it would be.")
@yes_option
def lookup(action: str, dryrun: bool, yes: bool) -> Call:
    """Show the lookup client (scheduler) or server (worker), close it, or make a new one."""
    if dryrun and action != "create":
        raise click.UsageError("--dryrun is for create only")
    if action != "info":
        require_yes(yes, _LOOKUP_DANGER.format(action=action))
    return {
        "info": lambda target: target.lookup_info(),
        "close": lambda target: target.lookup_close(),
        "create": lambda target: target.lookup_create(dryrun=dryrun),
        "recreate": lambda target: target.lookup_recreate(),
    }[action]


@asking(lmcache)
@actions("start", "stop", "reset", "status")
def stats(action: str) -> Call:
    """Count the chunks that are looked up; a scheduler does, if it is set up for it."""
    return {
        "start": lambda target: target.chunk_statistics_start(),
        "stop": lambda target: target.chunk_statistics_stop(),
        "reset": lambda target: target.chunk_statistics_reset(),
        "status": lambda target: target.chunk_statistics_status(),
    }[action]


@asking(bypass, "list")
def bypass_list() -> Call:
    """Show all storage backends, and those that are bypassed."""
    return lambda target: target.bypass_list()


@asking(bypass, "add")
@click.argument("name")
def bypass_add(name: str) -> Call:
    """Bypass a storage backend."""
    return lambda target: target.bypass_add(name)


@asking(bypass, "remove")
@click.argument("name")
def bypass_remove(name: str) -> Call:
    """Use a storage backend again."""
    return lambda target: target.bypass_remove(name)


@asking(lmcache, memory=True)
@hashes_argument
@click.option("--lookup-id", metavar="ID", help="Id of a request to come. Default: a new one.")
def prefetch(hashes: Sequence[str], lookup_id: str | None) -> Call:
    """Start to bring chunks up, in prefix order. Asks the first target only.

    Real LMCache holds the memory until a request with that id runs, or until a restart; the
    same id twice leaks.
    """
    from ramakv.lmcache.backend import fresh_lookup_id

    chunks = list(dict.fromkeys(hashes))
    return lambda target: target.memory_prefetch(chunks, lookup_id or fresh_lookup_id())


@asking(lmcache, memory=True)
@hashes_argument
@location_option
@yes_option
def evict(hashes: Sequence[str], locations: Sequence[str], yes: bool) -> Call:
    """Remove chunks, whoever needs them. Asks the first target only."""
    if not locations:
        require_yes(yes, _EVICT_DANGER)
    chunks = list(dict.fromkeys(hashes))
    return lambda target: target.memory_evict(chunks, locations or None)


@asking(lmcache, memory=True)
@hashes_argument
def query(hashes: Sequence[str]) -> Call:
    """Show where chunks lie. Asks the first target only; many an LMCache cannot tell."""
    chunks = list(dict.fromkeys(hashes))
    return lambda target: target.memory_query(chunks)
