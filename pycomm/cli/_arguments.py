"""What commands check of their arguments, before anything is started or measured."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from ..errors import ConfigError
from ..sizes import parse_bytes
from ..topology import memory_bytes

__all__ = ["PICTURES", "check_output", "check_transport", "message_bytes", "positive", "positive_int"]

PICTURES = (".png", ".svg", ".pdf")


def positive(text: str) -> float:
    """Returns a number above 0 and up to 1e9 (seconds are 30 years), as a type of argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"expected a number above 0, 1e9 at most, got {text!r}")
    return value


def positive_int(text: str) -> int:
    """Returns a whole number from 1 to 2**31 - 1, as a type of argparse."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 2147483647, got {text!r}")
    return int(text)


def message_bytes(option: str, text: str) -> int:
    """Returns the size of a message that ``option`` asks for; raises ConfigError if no rank here can hold it."""
    nbytes = parse_bytes(text)
    if nbytes > memory_bytes():
        raise ConfigError(f"{option} {text}: this host has {memory_bytes() / 2**30:.1f} GiB of memory in all")
    return nbytes


def check_output(option: str, path: str | Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Raises ConfigError if the file of ``option`` will not be writable, or is not one of ``suffixes``, if any."""
    if path is None:
        return
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {path}: expected a name that ends in {', '.join(suffixes)}")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: expected a file, got a folder")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.absolute().parent}; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{option} {path}: it may not be written; name another file")


def check_transport(name: str) -> None:
    """Raises ConfigError if ``name`` is no transport of pycomm.init."""
    from ..transport import TRANSPORTS

    if name != "auto" and name not in TRANSPORTS:
        raise ConfigError(f"--transport: {TRANSPORTS.unknown(name)}")
