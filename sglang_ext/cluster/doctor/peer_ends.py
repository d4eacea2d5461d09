"""``sglang-ext doctor --peer``, which asks, and ``--listen``, which answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final, TypeVar

from zmq.error import ZMQError

from sglang_ext.addresses import bracketed, split_port
from sglang_ext.cluster.doctor.peer import Seen, Trouble, TroubleError
from sglang_ext.cluster.doctor.peer_messages import VERSION, End, Examine, Examined, Hail
from sglang_ext.cluster.doctor.peer_ports import greet
from sglang_ext.cluster.doctor.peer_station import Own, Station, open_station
from sglang_ext.disagg.errors import PeerGoneError, RefusedError, TransferDeadlineError
from sglang_ext.disagg.transfer.control import ControlClient
from sglang_ext.errors import ConfigError, SglangExtError

CONNECT_S: Final = 5.0
"""Seconds for connecting, for a greeting, and for the first answer."""
ANSWER_S: Final = 120.0
"""Seconds for one answer: the listener tries every port and every transport before, for callers by turns."""
SILENCE_S: Final = 10.0
"""A listener that answers nothing for so long is gone."""
PAUSE_S: Final = 0.5
"""Between two questions whether it lives."""
HAILS: Final = 5
_REFUSALS: Final = {
    "version": Trouble.VERSION,
    "address": Trouble.ADDRESS,
    "protocol": Trouble.NOT_OURS,
    "service": Trouble.NOT_OURS,
}

T = TypeVar("T")


def call(host: str, port: int, own: Own) -> Seen:
    """Test the way to a listener and back. Errors are in the result."""
    return asyncio.run(_call(host, port, own))


async def _call(host: str, port: int, own: Own) -> Seen:
    seen = Seen(f"{bracketed(host)}:{port}", own.key is not None)
    try:
        source = await _greet(host, port, own)
        seen.doing = "the start of an endpoint here"
        bind = "::" if ":" in source else "0.0.0.0"
        async with open_station(own, bind if own.key else own.announced(bind, source)) as station:
            client = station.endpoint.client(seen.target)
            watch = asyncio.create_task(_watch(client, source))
            try:
                await _examine(client, station, source, own, seen)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                await client.close()
    except TroubleError as error:
        seen.trouble = error
    except RefusedError as error:
        text = error.message.removeprefix(f"{error.reason}: ")
        seen.trouble = TroubleError(_REFUSALS.get(error.reason, Trouble.ENDED), text)
    except (SglangExtError, OSError, ZMQError) as error:
        seen.trouble = TroubleError(Trouble.ENDED, str(error))
    return seen


async def _greet(host: str, port: int, own: Own) -> str:
    """The greeting alone; returns this end's address on the way there.

    Raises:
        TroubleError: there is no listener, or only one of the two ends has a key.
    """
    source, mechanism = await greet(host, port, CONNECT_S)
    if mechanism not in ("NULL", "CURVE"):
        raise TroubleError(Trouble.NOT_OURS, "another program listens")
    if (mechanism == "CURVE") != (own.key is not None):
        without = "caller" if own.key is None else "listener"
        raise TroubleError(Trouble.NO_KEY, f"the {without} was given no cluster key, the other end one")
    return source


async def _watch(client: ControlClient, source: str) -> None:
    """End the requests of a client whose listener answers nothing any more."""
    with contextlib.suppress(RefusedError, PeerGoneError):  # also named by the request that they end
        while True:
            await asyncio.sleep(PAUSE_S)
            try:
                await client.ask(_hail(source), SILENCE_S)
            except TransferDeadlineError:
                client.fail(PeerGoneError(f"it answered nothing for {SILENCE_S:g} s"))


async def _examine(client: ControlClient, station: Station, source: str, own: Own, seen: Seen) -> None:
    seen.doing = "the look at the clocks"
    for number in range(HAILS):
        start, before = time.monotonic(), own.wall()
        try:
            seen.theirs = await _ask(client, _hail(source), End, ANSWER_S if number else CONNECT_S)
        except TransferDeadlineError:
            if number or own.key is None:
                raise
            # ZeroMQ drops a connection with another key without a word.
            raise TroubleError(Trouble.KEY, "the cluster keys of the two ends differ") from None
        took = time.monotonic() - start
        if seen.rtt is None or took < seen.rtt:
            seen.rtt, seen.ahead = took, seen.theirs.wall - (before + took / 2)
    assert seen.theirs is not None
    seen.doing = "the look from here"
    seen.ours = station.end(source, split_port(seen.target)[0])
    seen.here = await station.examine(seen.theirs, own.reach)
    seen.doing = "the look from there"
    seen.reach = own.reach
    seen.there = await _ask(client, Examine(seen.ours, own.reach), Examined, ANSWER_S)


async def _ask(client: ControlClient, message: Any, kind: type[T], seconds: float) -> T:
    answer = await client.ask(message, seconds)
    if not isinstance(answer, kind):
        raise TroubleError(Trouble.NOT_OURS, f"said {type(answer).__name__}, not {kind.__name__}")
    return answer


def _hail(source: str) -> Hail:
    return Hail(VERSION, version("sglang-ext"), source)


def listen(host: str, port: int, own: Own, seconds: float, say: Callable[[str], None]) -> None:
    """Answer callers for so long, or until Ctrl-C. say: called with one line for each.

    Raises:
        ConfigError: the address cannot be listened at.
    """

    async def serve() -> None:
        async with open_station(own, host, port, say) as station:
            say(f"Listening at {station.endpoint.address} for {seconds:g} s, or until Ctrl-C")
            await asyncio.sleep(seconds)

    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve())
    except (OSError, ZMQError) as error:
        at = f"{bracketed(host)}:{port}"
        raise ConfigError(f"cannot listen at {at}: {error.strerror}", field="--listen") from None
