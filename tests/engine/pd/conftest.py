"""Tests of models with windows and states that need SGLang's own linker for them, from 0.5.23 on."""

from __future__ import annotations

from sglang_ext.patches.versions import follows_hybrids, installed_sglang_version

collect_ignore = (
    []
    if follows_hybrids(installed_sglang_version())
    else ["test_pd_whole_requests.py", "test_moved_rows.py", "test_pd_unequal_rows.py"]
)
