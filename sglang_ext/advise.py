"""Hints from Python programs (``Hints``, ``advise``): from `sglang_ext.client`, which programs without this
package install as ``sglang-ext-client``.
"""

from __future__ import annotations

from sglang_ext.client.hints import MOST_WAITING, Announcement, Hints, advise

__all__ = ["MOST_WAITING", "Announcement", "Hints", "advise"]
