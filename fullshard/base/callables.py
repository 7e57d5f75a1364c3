"""Finds the function that `file.py:callable` or `package.module:callable` names. Runs the file's code."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.base.errors import FullshardError, first_line, nearest
from fullshard.base.reading import is_plain_file

FROM_FILE = "_fullshard_"  # before the names of modules that are files of the user's


def is_callable_name(spec: str) -> bool:
    """True for `file.py:callable` and `package.module:callable`."""
    where, colon, name = spec.rpartition(":")
    return bool(colon) and name.isidentifier() and (where.endswith(".py") or all(p.isidentifier() for p in where.split(".")))


def load_callable(spec: str, returns: str) -> Callable[..., Any]:
    """The callable that `spec` names. `returns`: what it is expected to return, for errors."""
    where, _, name = spec.rpartition(":")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where, spec)
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise FullshardError(f"{where} has no {name!r}{nearest(name, public)} (it has {', '.join(public) or 'no callables'})")
    function = getattr(module, name)
    if not callable(function):
        raise FullshardError(f"{spec} is of type {type(function).__name__}; write the name of a callable that returns {returns}")
    return function


def _import_file(path: Path) -> ModuleType:
    if not is_plain_file(path):
        raise FullshardError(f"there is no file {path}; write path/to/file.py:callable")
    name = f"{FROM_FILE}{path.stem}"  # a file called json.py must not replace the json module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module here
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.append(beside)  # last: what it imports from beside it must not replace other modules
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise FullshardError(f"cannot import {path}: {type(error).__name__}: {first_line(error)}") from error
    return module


def _import_module(name: str, spec: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise FullshardError(
            f"cannot import {spec}: {first_line(error)}; write package.module:callable or path/to/file.py:callable"
        ) from error
