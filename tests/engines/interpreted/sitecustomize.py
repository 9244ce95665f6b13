"""Runs vLLM's kernels for a GPU on a CPU: on PYTHONPATH, with TRITON_INTERPRET=1.

vLLM's build for a CPU takes Triton only with a backend for it, which Triton's interpreter does not
need. The interpreter's loops count in plain integers, but a kernel of vLLM calls their method `to`.
"""

import builtins
from types import SimpleNamespace

from triton.backends import backends
from triton.runtime import interpreter


class Integer(int):
    def to(self, dtype):
        return self


backends["cpu"] = SimpleNamespace(driver=None)
interpreter.range = lambda *arguments: map(Integer, builtins.range(*arguments))
