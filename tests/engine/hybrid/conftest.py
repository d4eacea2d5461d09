"""Tests of models with windows and states, which SGLang serves on the interfaces used here from 0.5.22 on."""

from __future__ import annotations

from sglang.srt.mem_cache import common

collect_ignore_glob = [] if hasattr(common, "checkpoint_kv_cache") else ["test_*.py"]
