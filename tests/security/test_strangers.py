"""Channels between members let in members only, and nothing that merely knows how a member is addressed."""

from __future__ import annotations

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_ext.cluster_key import ClusterKey
from sglang_ext.engine.events.agent_socket import AgentSocket
from sglang_ext.testing.waiting import wait_until

KEY = ClusterKey(b"k" * 16 + b"a key that nobody guesses, for tests")


def outcome(agent: AgentSocket, pair: tuple[bytes, bytes] | None) -> zmq.Event:
    """How the handshake of a client ends that knows the agent's address and its public key.

    Args:
        pair: of the client, (public, secret) in Z85; None for a client without a key.
    """
    ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    ends |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        if pair is not None:
            client.curve_publickey, client.curve_secretkey = pair
            client.curve_serverkey = agent.public_key.encode()
        with client.get_monitor_socket(ends) as monitor:
            client.connect(f"tcp://127.0.0.1:{agent.port}")

            def has_ended() -> bool:
                agent.wait(0.0)
                return bool(monitor.poll(0))

            wait_until(has_ended, seconds=60, what="the end of a handshake")
            found: zmq.Event = recv_monitor_message(monitor)["event"]
            client.disable_monitor()
    return found


@pytest.mark.parametrize("who", ["another key pair", "no key", "a member"])
def test_an_agent_lets_in_members_only(who: str) -> None:
    agent = AgentSocket("127.0.0.1", (0,), KEY)
    try:
        pair = {"another key pair": zmq.curve_keypair(), "no key": None, "a member": KEY.curve_pair()}[who]
        let_in = outcome(agent, pair) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert let_in is (who == "a member")
    finally:
        agent.close()
