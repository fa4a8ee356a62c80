"""The MPI library: importing mpi4py with an error that helps, and what the library can do."""

from __future__ import annotations

import atexit
import ctypes
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .. import env
from ..errors import NativeUnavailableError

__all__ = ["import_mpi", "is_cuda_aware", "leave_unfinalized"]

_is_whole = True  # no rank of this MPI job has been lost


@cache
def import_mpi() -> Any:
    """Returns ``mpi4py.MPI``. Importing it initializes MPI, unless the program has done so.

    Then MPI is finalized at the exit, unless a rank has been lost: MPI_Finalize would wait for it for ever.
    Raises NativeUnavailableError, with the command to type, if mpi4py or the MPI library is missing.
    """
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            if mpi4py.rc.finalize is None:  # the program does not ask for anything else
                mpi4py.rc.finalize = False
                atexit.register(_finalize)
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise NativeUnavailableError(
            "MPI is needed here and mpi4py is not installed. Beside an MPI of the site: pip install 'pycomm[mpi]'; "
            "with an MPI from a wheel: pip install 'pycomm[mpich]'"
        ) from error
    except (ImportError, RuntimeError) as error:  # mpi4py's wheels raise the second if they find no library
        first_line = str(error).partition("\n")[0]
        raise NativeUnavailableError(
            f"MPI is needed here and mpi4py cannot load an MPI library ({first_line}). Put the site's libmpi on the "
            f"loader's path (module load ...), or: pip install 'pycomm[mpich]'"
        ) from error
    return MPI


def leave_unfinalized() -> None:
    """Says that a rank of this job has been lost."""
    global _is_whole
    _is_whole = False


def _finalize() -> None:
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and _is_whole and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


@cache
def is_cuda_aware() -> bool:
    """Says whether the loaded MPI takes CUDA memory: asks it, by the query that MPICH and Open MPI share.

    ``PYCOMM_MPI_CUDA_AWARE`` overrides the answer.
    """
    said = env.read("PYCOMM_MPI_CUDA_AWARE")
    if said is not None:
        return bool(said)
    import_mpi()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for path in sorted(set(re.findall(r"\S*/libmpi\.so\S*", maps))):
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False
