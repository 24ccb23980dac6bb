"""Public names and modules of a package that are imported on first use: an import takes what is used of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any


def on_first_use(package: str, names: Collection[str], *modules: str) -> Callable[[str], Any]:
    """The package's `__getattr__` (PEP 562): imports one of its names, or a module of its own.

    Args:
        names: the package's `__all__`.
        modules: where they are, relative to the package; the first that has a name counts.
    """

    def find(name: str) -> Any:
        if name in names:
            for module in modules:
                if (found := getattr(import_module(module, package), name, None)) is not None:
                    return found
        elif not name.startswith("_"):
            path = f"{package}.{name}"
            try:
                return import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
