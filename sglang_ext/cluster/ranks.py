"""Schedulers of a server by its flags: ranks, replicas (``--dp-size``, DP attention), and their ports."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.cluster.config import ClusterConfig, flag_value
from sglang_ext.errors import ConfigError

TP_FLAGS = ("--tp-size", "--tensor-parallel-size", "--tp")
PP_FLAGS = ("--pp-size", "--pipeline-parallel-size", "--pp")
DP_FLAGS = ("--dp-size", "--data-parallel-size", "--dp")
ATTENTION_FLAGS = ("--attn-dp-size", "--attention-data-parallel-size")
ATTENTION_SWITCH = "--enable-dp-attention"
"""With ``--dp-size``: ``--attn-dp-size`` as it was called before."""
CONTEXT_FLAGS = ("--attn-cp-size", "--attention-context-parallel-size")
CACHING_FLAG = "--kv-pd-caching"
RENDEZVOUS_FLAG = "--nccl-port"
"""Where the ranks of a server meet through torch, on every device, a single rank too."""
MEETING_FLAGS = ("--dist-init-addr", "--nccl-init-addr")
MEETING_PORTS = 14
"""Ports that the ranks of a server with DP attention take, from that of ``--dist-init-addr`` on: of torch's
store, of six sockets behind it, and of the handshake between nodes, 13 behind, with one node too."""


def ranks(flags: Sequence[str]) -> int:
    """Scheduler processes of a server, each with its device or its share of the cores.

    Raises:
        ConfigError: a size is no number; names the flag.
    """
    # With DP attention, the replicas share the ranks of one tensor-parallel group.
    copies = 1 if has_dp_attention(flags) else _size(flags, DP_FLAGS)
    return _size(flags, TP_FLAGS) * _size(flags, PP_FLAGS) * copies


def has_replicas(flags: Sequence[str]) -> bool:
    """Whether a server has several schedulers with trees of their own.

    Raises:
        ConfigError: as ``ranks``.
    """
    return _size(flags, DP_FLAGS) > 1 or has_dp_attention(flags)


def has_dp_attention(flags: Sequence[str]) -> bool:
    """Whether the replicas of a server share all layers but attention.

    Raises:
        ConfigError: as ``ranks``.
    """
    switched = flag_value(flags, ATTENTION_SWITCH) is not None and _size(flags, DP_FLAGS) > 1
    return switched or _size(flags, ATTENTION_FLAGS) > 1


def meeting_ports(config: ClusterConfig, index: int) -> int:
    """How many ports in a row the ranks of a server need to meet.

    Raises:
        ConfigError: as ``ranks``.
    """
    return MEETING_PORTS if has_dp_attention(config.flags_of(index)) else 1


def meeting(flags: Sequence[str], port: int, host: str) -> list[str]:
    """Flags by which the ranks of a server meet at a port, unless the user has given them.

    SGLang would pick a port that the kernel also gives to connections, and listen on it only seconds later: a
    connection that gets the port in between ends the server at its start. With DP attention it takes ports at
    fixed distances from the server's, where the next server's may be.

    Args:
        port: the first of ``meeting_ports`` in a row.
        host: where the ranks listen.

    Raises:
        ConfigError: as ``ranks``.
    """
    if has_dp_attention(flags):
        return [] if flag_value(flags, *MEETING_FLAGS) is not None else [MEETING_FLAGS[0], f"{host}:{port}"]
    if _size(flags, DP_FLAGS) > 1 or flag_value(flags, RENDEZVOUS_FLAG) is not None:
        # Each replica would bind this one port. SGLang holds one for each until all have started.
        return []
    return [RENDEZVOUS_FLAG, str(port)]


def refuse_context(flags: Sequence[str]) -> None:
    """Refuse flags before any server starts that ``patches/adapter/admission.py`` refuses in each server.

    Raises:
        ConfigError: they are given; names the flag.
    """
    value = flag_value(flags, *CONTEXT_FLAGS)
    if value is not None and value.strip() not in ("", "1"):
        raise ConfigError(
            f"{value} does not go with --disaggregation-transfer-backend global",
            field=CONTEXT_FLAGS[0],
            hint="Give --tp-size instead",
        )


def refuse_unknown_replicas(flags: Sequence[str], *, keeps: bool, registers: bool) -> None:
    """Refuse replicas that the router would not know: a server's URL stands for all of them.

    Args:
        keeps: whether the server keeps KV; with PD, ``--kv-pd-caching`` says so.
        registers: whether it registers with the router.

    Raises:
        ConfigError: it would not know them; names the flag.
    """
    if not has_replicas(flags) or (keeps and registers):
        return
    field = next(name for name in (*ATTENTION_FLAGS, *DP_FLAGS) if flag_value(flags, name) is not None)
    if not keeps:
        raise ConfigError(
            f"replicas that keep no KV do not register with the router ({CACHING_FLAG} "
            f"{flag_value(flags, CACHING_FLAG)})",
            field=field,
            hint=f"Use {CACHING_FLAG} 2 or 3, or a server for each replica",
        )
    raise ConfigError(
        "replicas do not register with a router that speaks TLS, as they do not know its certificate",
        field=field,
        hint="End TLS in front of the router, without --tls-cert-file, or give a server for each replica",
    )


def _size(flags: Sequence[str], names: Sequence[str]) -> int:
    value = flag_value(flags, *names)
    if value is None:
        return 1
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{value!r} is not a number of ranks", field=names[0])
    return int(value)
