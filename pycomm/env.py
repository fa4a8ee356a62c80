"""The one table of ``PYCOMM_*`` environment variables, and the only place that reads them.

Nothing is read at import: a variable counts at the moment it is asked for, normally in ``pycomm.init``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

__all__ = ["VARIABLES", "Variable", "is_set", "read"]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable: ``name``, how its text is read, the ``default`` when unset, and its ``meaning``."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str

    @property
    def type_name(self) -> str:
        """What a user should write, e.g. ``"float"``."""
        return "str" if self.parse is _text else "0 or 1" if self.parse is _flag else self.parse.__name__


def _text(raw: str) -> str:
    return raw.strip()


def _flag(raw: str) -> bool:
    if raw.strip() not in ("0", "1"):
        raise ValueError(raw)
    return raw.strip() == "1"


_TABLE = (
    Variable(
        name="PYCOMM_TRANSPORT",
        parse=_text,
        default="auto",
        meaning="transport of init(transport='auto'): a registered name, or auto (shm on one host, else mixed)",
    ),
    Variable(
        name="PYCOMM_STORE",
        parse=_text,
        default="",
        meaning="set by `pycomm run`: MASTER_ADDR:MASTER_PORT=PATH, the file in which ranks meet that are told to meet "
        "there",
    ),
    Variable(
        name="PYCOMM_TIMEOUT_S",
        parse=float,
        default=600.0,
        meaning="seconds that one call may wait for other ranks before CollectiveTimeoutError",
    ),
    Variable(
        name="PYCOMM_LOG",
        parse=_text,
        default="warning",
        meaning="debug, info, warning or error; info says at init what was found and chosen",
    ),
    Variable(
        name="PYCOMM_ALGORITHMS",
        parse=_text,
        default="",
        meaning="rules of the table of algorithms, asked before all others; separated by ;, as `pycomm tune --show` "
        "prints them",
    ),
    Variable(
        name="PYCOMM_TORCH_COMPRESSION",
        parse=_text,
        default="",
        meaning="compression of process groups of the torch.distributed backend, such as int8, if they name none",
    ),
    Variable(
        name="PYCOMM_CACHE_DIR",
        parse=_text,
        default="",
        meaning="folder of what `pycomm tune` has found, instead of pycomm in the user's cache folder",
    ),
    Variable(
        name="PYCOMM_MONITOR",
        parse=_flag,
        default=True,
        meaning="1 or 0: whether calls are recorded on the board, where `pycomm top` and `pycomm doctor` see them",
    ),
    Variable(
        name="PYCOMM_HANG_S",
        parse=float,
        default=10.0,
        meaning="seconds that a call waits for other ranks before every rank says who is missing; inf: it never does",
    ),
    Variable(
        name="PYCOMM_MPI_CUDA_AWARE",
        parse=_flag,
        default=None,
        meaning="1 or 0: whether the MPI takes CUDA memory, if asking the library gives the wrong answer",
    ),
)

VARIABLES: Mapping[str, Variable] = {variable.name: variable for variable in _TABLE}


def is_set(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Says whether ``name``, which must be in the table, has a non-empty value."""
    return bool((os.environ if environ is None else environ).get(VARIABLES[name].name, "").strip())


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Returns the value of ``name``, which must be in the table; an empty value counts as unset.

    Raises ConfigError if the text cannot be read as the variable's type.
    """
    variable = VARIABLES[name]
    raw = (os.environ if environ is None else environ).get(name, "")
    if not raw.strip():
        return variable.default
    try:
        return variable.parse(raw)
    except ValueError:
        raise ConfigError(
            f"environment variable {name} cannot be used: expected {variable.type_name}, got {raw!r} "
            f"({variable.meaning}); correct it or unset it"
        ) from None
