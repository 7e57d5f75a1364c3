"""Imports the libraries of the zoo once, for all ranks: those that are installed, with a stub in place of torchvision."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes torchvision and all modules inside, for timm and diffusers, which import parts that their models do not need."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]
        module.__getattr__ = _stub  # type: ignore[method-assign]


class _Stub(type):
    """A class with any attribute."""

    def __getattr__(cls, attribute: str) -> type:
        return _stub(attribute)


def _stub(attribute: str) -> type:
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return _Stub(attribute, (), {})


def load(name: str) -> types.ModuleType:
    """A library, with the stub where torchvision is not installed."""
    if not any(isinstance(finder, _StubFinder) for finder in sys.meta_path):
        sys.meta_path.append(_StubFinder())  # the last: one that is installed is found before
    return importlib.import_module(name)


for _name in ("transformers", "timm", "diffusers"):
    with contextlib.suppress(ImportError):
        load(_name)
