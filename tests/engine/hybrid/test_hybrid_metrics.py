"""The metrics of a hybrid model's tiers are those of its store."""

from __future__ import annotations

from pathlib import Path

from hybrid_rig import COMPONENTS, Rig, pages
from test_hybrid_store import disk_at

from sglang_ext.engine.hybrid.metrics import HybridMetrics


def test_metrics_show_both_tiers_and_each_event(tmp_path: Path) -> None:
    rig = Rig(dict.fromkeys(COMPONENTS, 64), disk_at(tmp_path))
    metrics = HybridMetrics(3)
    rig.compute(pages(1, 4))
    rig.load(pages(1, 4), 4)
    rig.store.settle()
    metrics.update(rig.store, {"prefetch_from_storage": 2})

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"sglang_ext_cache_{name}", {**labels, "tp_rank": "3"})

    held = 4 + 4 + 1
    assert value("blocks", tier="dram") == value("blocks", tier="disk") == held
    assert value("capacity_blocks", tier="dram") == rig.store.dram.capacity_blocks > 2 * 64
    assert value("dram_blocks_total", event="written") == held
    assert value("dram_blocks_total", event="loaded") == 4 + 2 + 1
    assert value("disk_backlog_bytes") == 0
    assert value("faults_total", call="prefetch_from_storage") == 2
    rig.compute(pages(2, 1))
    metrics.update(rig.store, {})
    assert value("dram_blocks_total", event="written") == held, "updated again within a second"
    rig.close()
