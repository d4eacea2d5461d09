"""Properties of this machine that the plan needs: cores, accelerators."""

from __future__ import annotations

import os

from sglang_ext.cluster.plan import HostFacts


def host_facts() -> HostFacts:
    """Cores from the scheduler's affinity, accelerators from torch."""
    from sglang_ext.patches.cpu import runtime

    accelerators = 0
    if runtime.accelerator_available():
        import torch

        accelerators = torch.accelerator.device_count()
    return HostFacts(cores=len(os.sched_getaffinity(0)), accelerators=accelerators)
