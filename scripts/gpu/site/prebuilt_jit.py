"""Kernels that SGLang compiles at run time (``load_jit``), from a folder of built ones, by the module's name.

SGLang's own cache is keyed by the compilers' versions too: nothing built elsewhere would be found in it.
"""

import importlib.util
import os
import sys

LOADER = "sglang.kernels.jit.utils.compile.loader"
FOLDER = os.path.join(os.path.dirname(__file__), "sglang_jit")


def _around(module):
    stock = module.load_jit

    def load_jit(*args, **kwargs):
        path = os.path.join(FOLDER, "sgl_kernel_jit_" + "_".join(str(a) for a in args) + ".so")
        if os.path.exists(path):
            from tvm_ffi import load_module

            return load_module(path)
        print(f"prebuilt_jit: none of {args}; compiling", file=sys.stderr, flush=True)
        return stock(*args, **kwargs)

    module.load_jit = load_jit


class Finder:
    busy = False

    def find_spec(self, name, path=None, target=None):
        if name != LOADER or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        stock = spec.loader.exec_module

        def exec_module(module):
            stock(module)
            _around(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
