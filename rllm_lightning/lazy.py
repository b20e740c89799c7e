"""Names of a package that are loaded from their modules when they are first asked for, so that importing the package is free."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], extra: str | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """What a package assigns to `__all__`, `__getattr__` and `__dir__`.

    Args:
        package: the package's `__name__`.
        modules: module of the package -> the names it provides, between blanks.
        extra: the extra of this distribution with the libraries that the modules import; the error for one that is missing names it.
    """
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(homes[name])
        except ModuleNotFoundError as error:
            if extra is None:
                raise
            raise ModuleNotFoundError(
                f"{package} needs the package {error.name!r}: pip install 'rllm-lightning[{extra}]'", name=error.name
            ) from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return sorted(homes), load, listing
