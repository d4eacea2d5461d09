"""One side of hand-overs in a process of its own, for tests that kill or stop it: `pd_process.py JSON`.

Reads commands from stdin, a line each, and answers each with a line: the hand-over's new state. rank, ranks:
its rank, and the number of its server's ranks. `hold` stops later writes before their first byte; `go` lets
it go on. `deaf`: it ignores every later COMPLETE.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from pd_rig import METADATA, Rows, held, pool, transfer_thread

from sglang_ext.disagg.messages import Complete
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.peers import Local
from sglang_ext.testing.transfer.rig import Gate

PAGE = 4


def main() -> None:
    options = json.loads(sys.argv[1])
    prefills = options["role"] == "prefill"
    rank, ranks = options.get("rank", 0), options.get("ranks", 1)
    spec, _ = pool(rank, ranks, PAGE, seed=1 + rank)
    local = Local(rank, ranks, PAGE, METADATA, options["mode"])
    bootstrap = options["address"] if prefills else ""
    transfers = transfer_thread(options["role"], [spec], rank=rank)
    agent = Agent(AgentConfig(local, "weights", bootstrap=bootstrap), transfers, Rows())
    handover = None
    gates: list[Gate] = []
    print("started", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["open", number]:
                if prefills:
                    handover = agent.sender.open(int(number))
                else:
                    handover = agent.receiver.open(options["address"], int(number))
            case ["complete"]:
                agent.sender.complete(handover, np.array([1, 2]), bytes(METADATA))
            case ["read"]:
                agent.receiver.read(handover, Wanted(np.array([3, 4]), 0, 0))
            case ["deaf"]:
                owner = agent.endpoint.owner
                owner.handle = held(owner.handle, Complete, asyncio.Event())  # type: ignore[method-assign]
            case ["hold"]:
                gates = [
                    Gate(link.peer, "write")
                    for instance in agent.endpoint.instances
                    for link in instance.links
                ]
            case ["go"]:
                for gate in gates:
                    gate.go.set()
            case ["held"]:
                print("held" if any(gate.reached.is_set() for gate in gates) else "running", flush=True)
                continue
        print(handover.state.value if handover is not None else "none", flush=True)


if __name__ == "__main__":
    main()
