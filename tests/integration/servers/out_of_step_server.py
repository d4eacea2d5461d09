"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose second rank can get out of step.

While there is a file ``skip`` in its folder (`hooked_server`), that rank counts each pass of the scheduler
twice.
"""

from __future__ import annotations

from pathlib import Path

from hooked_server import serve


def count_twice(folder: Path) -> None:
    """Look for the file in the scheduler of the second rank."""
    import torch.distributed

    from sglang_ext.engine.ranks import Ranks

    each_pass = Ranks.each_pass

    def counted(self: Ranks) -> None:
        if torch.distributed.get_rank() == 1 and (folder / "skip").exists():
            self.passes += 1
        each_pass(self)

    Ranks.each_pass = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(count_twice)
