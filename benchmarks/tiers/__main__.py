"""The speed at which blocks move between the engine's pool, DRAM and disk, and its effect on a request.

Copies are measured against libc's memcpy of the same scattered blocks, and with a GPU (`--parts gpu`) against
one plain copy; loads from disk against fio reading the same file system with the same bytes in flight, and
beside other ways to keep blocks: as values in LMDB, as a file per page, and LMCache's local disk backend.
With real servers: the time to first token by the tier that holds the prompt, the share of the load that it
does not show, what writing costs decoding and an acknowledged end its answer, and what retracting others
gains a request of a higher priority. With traces (`--parts budget`): the tokens that DRAM of models with
windows or states reuses. After a simulated day (`--parts churn`): in how many pieces a prompt is in DRAM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.common import Options, Report, at_least, at_most
from benchmarks.lib.data import data_flag, data_folder
from benchmarks.tiers import budget, churn, priority
from benchmarks.tiers.acked import measure_acked
from benchmarks.tiers.copy import measure_copies
from benchmarks.tiers.disk import measure_disk
from benchmarks.tiers.gpu import measure_gpu
from benchmarks.tiers.serving import measure_servers
from sglang_ext.flags import flag, one_of

PARTS = ("copy", "disk", "servers")
ASKED_FOR = ("acked", "budget", "churn", "gpu", "priority")
"""Parts that are measured when they are named."""
AIMS = {
    "dram_to_hbm_vs_copy": at_least(0.85),
    "hbm_to_dram_vs_copy": at_least(0.85),
    "gpu_load_vs_copy": at_least(0.85),
    "gpu_write_vs_copy": at_least(0.85),
    "disk_to_hbm_vs_fio": at_least(0.8),
    "disk_read_vs_lmdb_cold": at_least(1.0),
    "disk_read_vs_file_per_page_cold": at_least(1.0),
    "disk_read_vs_lmcache": at_least(1.0),
    "load_hidden_dram": at_least(0.9),
    "ttft_disk_vs_recompute_8k": at_most(0.5),
    "write_through_decode_cost": at_most(0.03),
    "acked_answer_vs_disk": at_most(1.1),
    budget.FIGURE: budget.AIM,
    priority.FIGURE: priority.AIM,
}


@dataclass(frozen=True, kw_only=True)
class TierOptions(Options):
    """The flags of this benchmark."""

    disk_path: Path | None = flag(None, "Folder on the disk to measure; the temporary folder else.")
    data: str | None = data_flag()
    lmcache_python: Path | None = flag(None, "Interpreter of an environment with LMCache, to measure it too.")
    parts: tuple[str, ...] = flag(tuple(PARTS), "What to measure.", one_of(*PARTS, *ASKED_FOR), several="+")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = TierOptions.of(argv, "tiers", __doc__)
    report = Report("tiers", AIMS)
    if "copy" in options.parts:
        measure_copies(options, report)
    if "disk" in options.parts:
        measure_disk(options, report, options.disk_path, options.lmcache_python)
    if "servers" in options.parts:
        measure_servers(options, report, options.disk_path)
    if "acked" in options.parts:
        measure_acked(options, report, options.disk_path)
    if "budget" in options.parts:
        budget.measure_budget(options, report, data_folder(options.data))
    if "churn" in options.parts:
        churn.measure_churn(options, report)
    if "gpu" in options.parts:
        measure_gpu(options, report)
    if "priority" in options.parts:
        priority.measure_priority(options, report)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
