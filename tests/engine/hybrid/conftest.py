"""Tests of models with windows and states, which SGLang serves on the interfaces used here from 0.5.22 on.
Its linker knows states from 0.5.23 on."""

from __future__ import annotations

from sglang.srt.mem_cache import common

collect_ignore_glob = []
if not hasattr(common, "checkpoint_kv_cache"):
    collect_ignore_glob.append("test_*.py")
else:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import _EXTERNAL_LINKER_SUPPORTED_COMPONENTS

    if ComponentType.MAMBA not in _EXTERNAL_LINKER_SUPPORTED_COMPONENTS:
        collect_ignore_glob += ["test_oracle_linker.py", "test_oracle_pages.py", "test_oracle_store.py"]
        collect_ignore_glob += ["test_field_reports.py", "test_oracle_ranks.py", "test_oracle_crossings.py"]
