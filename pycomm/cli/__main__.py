"""The command ``pycomm``: finds the subcommand's file, imports that one alone, and calls its ``main(argv) -> int``."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import PycommError

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
    """Runs one subcommand and returns its exit status; an error of pycomm is printed without a traceback."""
    parser = _parser()
    args = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    if args.version:
        from importlib.metadata import version

        print(f"pycomm {version('pycomm')}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return int(importlib.import_module(f"pycomm.cli.{args.command}").main(args.arguments) or 0)
    except PycommError as error:
        print(f"pycomm {args.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
