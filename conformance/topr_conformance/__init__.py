"""Is that TOPR? Checks a loss against the paper: `identify(loss).variant`, or the command. Needs torch only."""

from importlib import import_module

_NAMES = {
    "identification": "identify Report Hypothesis",
    "variants": "VARIANTS",
    "vectors": "VECTORS compare oracle",
    "losses": "InputError LossInputs adapted load push",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `topr-conformance --help` should not wait for torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
