"""Find the function that a user names on the command line."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import Tensor

from topr_conformance.losses import InputError


def load(name: str) -> Callable[..., Tensor]:
    """Import the function that package.module:function or folder/file.py:function names.

    Modules are also looked for in the current folder; a file imports from its own folder. Raises
    InputError, in one line, if the function cannot be imported.

    >>> load("topr_conformance.variants:per_token").__name__
    'per_token'
    """
    location, colon, attribute = name.rpartition(":")
    if not colon:
        raise InputError(f"{name}: write it as package.module:function or path/file.py:function")
    is_path = location.endswith(".py") or "/" in location
    if is_path:
        file = Path(location).with_suffix(".py")
        if not file.is_file():
            raise InputError(f"{name}: no file {file}; check the path")
        folder = str(file.parent)
        module_name = file.stem
    else:
        file = Path(*location.split(".")).with_suffix(".py")  # if it is in the current folder
        folder = ""
        module_name = location
    module = _import(name, module_name, folder)
    _check_not_hidden(name, file, module)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InputError(f"{name}: {module_name} has no function {attribute!r}; check the name")
    return function


def _import(name: str, module_name: str, folder: str) -> ModuleType:
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise InputError(f"{name}: cannot be imported: {type(error).__name__}: {error}") from error


def _check_not_hidden(name: str, file: Path, module: ModuleType) -> None:
    """Refuse a file whose name is that of a module which was imported before, from elsewhere."""
    source = getattr(module, "__file__", None)  # None: built into Python
    # The same content in two places, such as a copy of topr.py next to a trainer, does no harm.
    if file.exists() and (source is None or file.read_bytes() != Path(source).read_bytes()):
        raise InputError(f"{name}: {file} is hidden by {source or 'Python'}: rename the file")
