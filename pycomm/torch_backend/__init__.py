"""The ``torch.distributed`` backend ``pycomm``: ``torch.distributed.init_process_group("pycomm")``.

``register`` is called by ``import torch`` itself (entry point ``torch.backends``), or by torch 2.14 and later when the
name is first used (``torch.distributed.backends``). An error there would break every program of the user, so it raises
nothing and loads no native code; what is missing says so when a process group is made.

Where pycomm is used from a source tree, which has no entry points, ``import pycomm.torch_backend`` registers it.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compressed import DdpState, compress_fsdp, ddp_hook
    from .options import Options

__all__ = ["DdpState", "Options", "compress_fsdp", "ddp_hook", "register"]

NAME = "pycomm"
DEVICES = ("cpu", "cuda")
_MODULE_OF = {"DdpState": "compressed", "Options": "options", "compress_fsdp": "compressed", "ddp_hook": "compressed"}


def register() -> None:
    """Makes the name "pycomm" known to torch.distributed. Never raises; does nothing the second time."""
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
            # A list: torch up to 2.13 goes through the letters of a string.
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
    except Exception as error:
        logging.getLogger("pycomm").warning("the torch.distributed backend %r is not registered: %s", NAME, error)


def _create(c10d_options: Any, options: Any) -> Any:
    """Makes a process group; what torch calls on each member."""
    from .creation import create

    return create(c10d_options, options)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


register()
