"""Hot modules as Python, also where they were compiled (`sglang_ext.native`).

A test that derives a faulty class from a hot one, or replaces one of its functions, cannot do that to machine
code.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from sglang_ext.native import Native, is_compiled


def from_sources(name: str) -> ModuleType:
    """A module of the package as Python; where it was compiled, a second module beside the compiled one.

    All hot modules that it imports are Python, too. Classes of other modules, such as enums, are the same as
    everywhere. The import system keeps the compiled modules.
    """
    if not is_compiled(importlib.import_module(name)):
        return sys.modules[name]
    finders = [finder for finder in sys.meta_path if isinstance(finder, Native)]
    hot = {each for finder in finders for each in finder.files}
    compiled = {each: sys.modules.pop(each) for each in hot & sys.modules.keys()}
    # A module is bound in its package, too, by its name or another object is.
    names = [each.rpartition(".") for each in compiled if "." in each]
    before = [(sys.modules[name], last, getattr(sys.modules[name], last)) for name, _, last in names]
    for package, attribute, value in before:
        if isinstance(value, ModuleType):
            delattr(package, attribute)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders]
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path[:0] = finders
        for each in hot & sys.modules.keys():
            del sys.modules[each]
        sys.modules.update(compiled)
        for package, attribute, value in before:
            setattr(package, attribute, value)
