"""What the types of the schema cannot say, and what needs no facts about the model or the host."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from kvlaunch.config.schema import KVConfig, LaunchConfig, RdzvBackend
from kvlaunch.config.units import exact_bytes
from kvlaunch.errors import ConfigError

_ADDRESS_SPACE = 1 << 47
"""Bytes of user space with four-level page tables (Linux, x86-64)."""

_NAME = re.compile(r"[\w][\w .#:+@=-]{0,63}")
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+)(?::(?P<port>\d+))?")


def validate(config: LaunchConfig) -> None:
    """Check one config.

    Raises:
        ConfigError: the first rule that it breaks: the rule, the value, what to write instead.
    """
    _check_sizes(config)
    _check_names(config)
    _check_server(config)
    _check_nodes(config)
    _check_kv(config.kv)
    for key, seconds, zero in _durations(config):
        rule = (
            "must be a finite number of seconds"
            if not math.isfinite(seconds)
            else "must not be negative (seconds)"
            if seconds < 0 and zero
            else "must be more than 0 (seconds)"
            if seconds < 0 or (seconds == 0 and not zero)
            else None
        )
        if rule:
            raise ConfigError(f"{key}={seconds:g}: {rule}.", hint=f"For example: {key}=30")


def _durations(config: LaunchConfig) -> Iterator[tuple[str, float, bool]]:
    """Key, seconds, whether 0 makes sense."""
    yield "timeouts.ready_s", config.timeouts.ready_s, False
    yield "timeouts.drain_s", config.timeouts.drain_s, True
    yield "timeouts.term_s", config.timeouts.term_s, True
    yield "timeouts.node_s", config.timeouts.node_s, False
    yield "timeouts.hung_s", config.timeouts.hung_s, False
    yield "rdzv.timeout_s", config.rdzv.timeout_s, False
    yield "kv.commit_timeout_s", config.kv.commit_timeout_s, False
    yield "kv.cache.idle_s", config.kv.cache.idle_s, True


def _check_sizes(config: LaunchConfig) -> None:
    for key, value in (("tp", config.tp), ("pp", config.pp), ("nnodes", config.nnodes)):
        if value < 1:
            raise ConfigError(f"{key}={value}: must be at least 1.", hint=f"Write {key}=1, or leave it out.")
    if config.max_restarts < 0:
        raise ConfigError(f"max_restarts={config.max_restarts}: must not be negative.", hint="0 means: never again.")


def _check_names(config: LaunchConfig) -> None:
    for key, value in (("name", config.name), ("rdzv.id", config.rdzv.id)):
        if value is not None and not _NAME.fullmatch(value):
            raise ConfigError(
                f"{key}={value!r}: a name has 1 to 64 characters: letters, digits, space and . _ - # : + @ =, "
                "and starts with a letter or digit.",
                hint=f"For example: {key}=my-run",
            )
    if not config.model.name.strip() or (config.model.path is not None and not config.model.path.strip()):
        key = "name" if not config.model.name.strip() else "path"
        raise ConfigError(f"model.{key} is empty.", hint="Give a model, for example model=Qwen/Qwen3-8B")
    python = config.engine.python
    if python is not None and not python.strip():
        raise ConfigError("engine.python is empty.", hint="Give an interpreter, or engine.python=null for this one.")


def _check_server(config: LaunchConfig) -> None:
    port = config.server.port
    if not 0 <= port <= 65535:
        raise ConfigError(
            f"server.port={port}: a port is 0 to 65535.",
            hint="Write server.port=8000, or server.port=0 for any free one.",
        )
    host = config.server.host
    if not host or re.search(r"[\s/]", host):
        raise ConfigError(
            f"server.host={host!r}: must be a host name or an address.",
            hint="server.host=127.0.0.1 serves this machine only, server.host=0.0.0.0 every interface.",
        )


def _check_nodes(config: LaunchConfig) -> None:
    nnodes, rank, endpoint = config.nnodes, config.node_rank, config.rdzv.endpoint
    if endpoint is not None:
        match = _HOST_PORT.fullmatch(endpoint)
        if match is None or not 0 <= int(match["port"] or 0) <= 65535:
            raise ConfigError(
                f"rdzv.endpoint={endpoint!r}: must be HOST:PORT.", hint="For example: rdzv.endpoint=10.0.0.1:29500"
            )
        if nnodes > 1 and int(match["port"] or 0) == 0:
            raise ConfigError(
                f"rdzv.endpoint={endpoint!r}: with nnodes={nnodes} the port must be given, the same on every node.",
                hint=f"For example: rdzv.endpoint={match['host']}:29500",
            )
    if rank is not None and not 0 <= rank < nnodes:
        raise ConfigError(
            f"node_rank={rank}: must be 0 to {nnodes - 1} with nnodes={nnodes}.",
            hint="The first node is node_rank=0." if nnodes > 1 else "Leave it out on one node.",
        )
    if nnodes > 1 and rank is None and config.rdzv.backend is RdzvBackend.static:
        raise ConfigError(
            f"rdzv.backend=static with nnodes={nnodes} needs node_rank: nobody else hands out the ranks.",
            hint="node_rank=0 on the node of rdzv.endpoint, node_rank=1 on the next one.",
        )
    if config.local_addr is not None and not re.fullmatch(r"[0-9A-Za-z_.:%-]+", config.local_addr):
        raise ConfigError(
            f"local_addr={config.local_addr!r}: must be an address of this host.",
            hint="For example: local_addr=10.0.0.2",
        )


def _check_kv(kv: KVConfig) -> None:
    if not isinstance(kv.reserve, int) or kv.reserve <= 0:
        raise ConfigError(f"kv.reserve={kv.reserve}: must be more than 0 bytes.", hint="For example: kv.reserve=2GiB")
    if kv.reserve > _ADDRESS_SPACE:
        raise ConfigError(
            f"kv.reserve={exact_bytes(kv.reserve)}: a process has at most 128TiB of address space.",
            hint="For example: kv.reserve=2GiB",
        )
    if kv.page is not None and (not isinstance(kv.page, int) or kv.page <= 0):
        raise ConfigError(
            f"kv.page={kv.page}: must be more than 0 bytes.", hint="Leave it out for the smallest that can be mapped."
        )
    if kv.page is not None and kv.page > kv.reserve:
        raise ConfigError(
            f"kv.page={exact_bytes(kv.page)} is larger than kv.reserve={exact_bytes(kv.reserve)}.",
            hint="A page lies inside the reserve.",
        )
    if kv.block_size is not None and kv.block_size < 1:
        raise ConfigError(
            f"kv.block_size={kv.block_size}: must be at least 1 token.", hint="For example: kv.block_size=16"
        )
    if not isinstance(kv.cache.keep, int) or kv.cache.keep < 0:
        raise ConfigError(f"kv.cache.keep={kv.cache.keep}: must not be negative.", hint="0 keeps nothing.")
    low, high = kv.ahead.low, kv.ahead.high
    if not 0 <= low <= high:
        raise ConfigError(
            f"kv.ahead.low={low} and kv.ahead.high={high}: low must be 0 or more and at most high.",
            hint=f"For example: kv.ahead.low={max(low, 0)} kv.ahead.high={max(low, high, 0)}",
        )
