"""Fork processes in which eight threads copy at once, until one fails; print why.

Arguments: ``renew`` or ``keep`` torch's thread pool in them, and how many to fork at most.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from sglang_ext.patches.cpu.fork import renew_thread_pool

THREADS = 8
SOURCE = torch.ones(100_000, dtype=torch.float64)
TARGET = torch.empty(100_000)


def child(renew: bool) -> int:
    if renew:
        renew_thread_pool()
    together = threading.Barrier(THREADS)
    errors: list[str] = []

    def copy() -> None:
        together.wait()
        try:
            TARGET.copy_(SOURCE)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=copy) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        print(errors[0], flush=True)
    return len(errors)


def main(what: str, most: str) -> None:
    torch.set_num_threads(2)
    for _ in range(int(most)):
        if not (pid := os.fork()):
            os._exit(min(child(what == "renew"), 1))
        if os.waitpid(pid, 0)[1]:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
