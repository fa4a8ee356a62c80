"""The command ``pycomm``: finds the subcommand's file, imports that one alone, and calls its ``main(argv) -> int``."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import PeerLostError, PycommError

__all__ = ["commands", "main"]


def commands() -> dict[str, str]:
    """Returns the subcommands and the first line of their documentation, read from their files, not imported."""
    here = Path(__file__).parent
    files = {path.stem: path for path in here.glob("*.py")}
    files |= {path.parent.name: path for path in here.glob("*/__init__.py")}
    return {name: _summary(path) for name, path in sorted(files.items()) if not name.startswith("_")}


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n", 1)[0]


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<10} {summary}" for name, summary in commands().items())
    parser = argparse.ArgumentParser(
        prog="pycomm",
        description="Collective communication for Python and PyTorch.",
        epilog=f"commands:\n{listing}\n\n`pycomm COMMAND --help` says more about one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", metavar="COMMAND", choices=list(commands()), help=", ".join(commands()))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the command's own arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status.

    An error of pycomm or of the system (a file, a reader of the output that has gone) and Ctrl-C take one line, without
    a traceback.
    """
    if sys.stdout is None:  # closed by who started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  as long as the process
    arguments = sys.argv[1:] if argv is None else list(argv)
    who = " ".join(["pycomm", *arguments[:1]])
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except PycommError as error:
        _leave_last_words(error)
        print(f"{who}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return _output_has_gone()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # what rich makes of it
            return _output_has_gone()
        raise
    except OSError as error:
        print(f"{who}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{who}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _output_has_gone() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
    return 128 + signal.SIGPIPE


def _leave_last_words(error: PycommError) -> None:
    if isinstance(error, PeerLostError):  # else torch, which takes seconds, may not be there
        from ..collectives.last_words import leave_last_words

        leave_last_words(error)


def _run(arguments: list[str]) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.version:
        from importlib.metadata import version

        print(f"pycomm {version('pycomm')}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    return int(importlib.import_module(f"pycomm.cli.{args.command}").main(args.arguments) or 0)


if __name__ == "__main__":
    sys.exit(main())
