"""Makes vLLM's kernels for a GPU run on a processor: on PYTHONPATH, with TRITON_INTERPRET=1, of the process that does.

vLLM's build for a processor takes Triton only with a backend for it, which Triton's interpreter does without. The
interpreter's loops count in plain integers, which lack the method `to` that a kernel of vLLM's calls.
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
