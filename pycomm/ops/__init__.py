"""The native operators: one Python file each, with its schema, fake, plain-torch reference and dispatch."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

from ..errors import NativeUnavailableError

__all__ = ["native"]


@cache
def native() -> ModuleType:
    """Returns ``pycomm._native``, the native core.

    Raises NativeUnavailableError, with the command that builds it, if it is not there or cannot be loaded.
    """
    try:
        return importlib.import_module("pycomm._native")
    except ImportError as error:
        what = "is not built" if isinstance(error, ModuleNotFoundError) else "cannot be loaded"
        raise NativeUnavailableError(
            f"pycomm's native core {what}: expected the module pycomm._native, got {type(error).__name__}: {error}. "
            "Build it with `pip install -e . --no-build-isolation` in a checkout (needs a C++ compiler), or install "
            "the package again with `pip install --force-reinstall --no-deps PATH-OF-CHECKOUT-OR-WHEEL`."
        ) from error
