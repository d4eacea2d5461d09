"""SGLang's shapes where versions differ: a module per generation, `current` being the installed one's.

A seam has the class that our cache is built on (``CacheSeam``), and functions that mean the same in all of
them. No other module checks SGLang's version.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sglang_ext.patches.versions import installed_sglang_version, seam_of

if TYPE_CHECKING:
    from sglang_ext.patches.seams import v0_5_22 as current
else:
    current = import_module(f"{__name__}.{seam_of(installed_sglang_version())}")

__all__ = ["current"]
