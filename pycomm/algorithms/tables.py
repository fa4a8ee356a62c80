"""The table that `auto` goes by: which algorithm serves which call. Read and written as text, one rule a line.

[Note: the table]
A rule names a collective, a transport, the ranks and the hosts of a group, a range of bytes, and the algorithm:

    # collective            transport  ranks  hosts  bytes        algorithm
    all_reduce              torch      *      2-     64KiB-       hierarchical
    all_reduce              mpi        4      1      4KiB-1MiB    recursive_doubling
    *                       *          *      *      *            native

The first rule that fits a call serves it. ``*`` fits everything; ranks and hosts are a number, ``2-8`` (both included)
or ``2-``; bytes run from the first up to, but not including, the second. They count the largest buffer of the call. A
rule fits only where its algorithm can serve: `native` where the transport carries the call itself, others where they
have a plan for the collective and the group. Rules are separated by line ends or semicolons, so that an environment
variable holds them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from ..errors import ConfigError
from ..sizes import format_bytes, parse_bytes
from ..transport import TRANSPORTS
from ..types import VERBS
from . import find_algorithm

__all__ = ["Rule", "Table", "parse_rules", "show_rules"]

_COLUMNS = ("collective", "transport", "ranks", "hosts", "bytes", "algorithm")
_FORM = " ".join(_COLUMNS) + ", such as: all_reduce torch * 2- 64KiB- hierarchical"


class Span(NamedTuple):
    """A range; ``stop`` is not in it, None means without end."""

    start: int = 0
    stop: int | None = None

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.start <= number and (self.stop is None or number < self.stop)


class Rule(NamedTuple):
    """One line of the table; ``source`` says where it was written. ``*`` in a name fits every one."""

    verb: str
    transport: str
    ranks: Span
    hosts: Span
    nbytes: Span
    algorithm: str
    source: str = ""

    def is_for(self, verb: str, transport: str, ranks: int, hosts: int) -> bool:
        """Says whether the rule is for this collective in such a group, at some size."""
        names = self.verb in ("*", verb) and self.transport in ("*", transport)
        return names and ranks in self.ranks and hosts in self.hosts

    def fits_bytes(self, nbytes: int | None) -> bool:
        """Says whether the rule is for this many bytes; None, a size that ranks do not share, fits only ``*``."""
        return self.nbytes == Span() if nbytes is None else nbytes in self.nbytes

    def __str__(self) -> str:
        return " ".join(_cells(self))


class Table(NamedTuple):
    """Rules in the order in which they are asked, and a digest that is equal where the rules are."""

    rules: tuple[Rule, ...]
    digest: str

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> Table:
        """Returns the table of ``rules``."""
        kept = tuple(rules)
        return cls(kept, blake2b("\n".join(map(str, kept)).encode(), digest_size=7).hexdigest())


def parse_rules(text: str, source: str) -> tuple[Rule, ...]:
    """Returns the rules that ``text`` states. Raises ConfigError, with the rule, for what cannot be meant."""
    rules = []
    for part in ";".join(line.partition("#")[0] for line in text.splitlines()).split(";"):
        words = part.split()
        if words:
            try:
                rules.append(_parse_rule(words, source))
            except ConfigError as error:
                raise ConfigError(f"table of algorithms, {source}, rule {' '.join(words)!r}: {error}") from None
    return tuple(rules)


def show_rules(rules: Iterable[Rule], *, has_sources: bool = False) -> str:
    """Returns the rules as text, in columns, which ``parse_rules`` reads back; sources become comments."""
    rows: list[tuple[str, ...]] = [("# collective", *_COLUMNS[1:], "")]
    rows += [(*_cells(rule), f"# {rule.source}" if has_sources and rule.source else "") for rule in rules]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _parse_rule(words: list[str], source: str) -> Rule:
    if len(words) != len(_COLUMNS):
        raise ConfigError(f"expected {len(_COLUMNS)} words, {_FORM}; got {len(words)}")
    verb, transport, ranks, hosts, nbytes, algorithm = words
    if verb != "*" and verb not in VERBS:
        raise ConfigError(f"unknown collective {verb!r}; known: {', '.join(VERBS)}, *")
    if transport != "*" and transport not in TRANSPORTS:
        raise TRANSPORTS.unknown(transport)
    if algorithm != "native":
        has = find_algorithm(algorithm).verbs
        if verb != "*" and verb not in has:
            raise ConfigError(f"{algorithm} has no plan for {verb}; it has: {', '.join(has)}")
    return Rule(verb, transport, _span(ranks), _span(hosts), _byte_span(nbytes), algorithm, source)


def _span(text: str) -> Span:
    match = re.fullmatch(r"(\d+)(-)?(\d+)?", text)
    if text == "*":
        return Span()
    if match is None or (match[3] and int(match[3]) < int(match[1])):
        raise ConfigError(f"expected *, a number, 2-8 or 2-, got {text!r}")
    start = int(match[1])
    return Span(start, int(match[3]) + 1 if match[3] else None if match[2] else start + 1)


def _byte_span(text: str) -> Span:
    if text == "*":
        return Span()
    first, dash, last = text.partition("-")
    if not dash:
        raise ConfigError(f"bytes: expected *, 4KiB-1MiB or 1MiB-, got {text!r}")
    span = Span(parse_bytes(first), parse_bytes(last) if last else None)
    if span.stop is not None and span.stop <= span.start:
        raise ConfigError(f"bytes: expected more after the dash than before it, got {text!r}")
    return span


def _cells(rule: Rule) -> tuple[str, ...]:
    return (
        rule.verb,
        rule.transport,
        _number_text(rule.ranks),
        _number_text(rule.hosts),
        _bytes_text(rule.nbytes),
        rule.algorithm,
    )


def _number_text(span: Span) -> str:
    if span == Span():
        return "*"
    if span.stop is None:
        return f"{span.start}-"
    return str(span.start) if span.stop == span.start + 1 else f"{span.start}-{span.stop - 1}"


def _bytes_text(span: Span) -> str:
    if span == Span():
        return "*"
    first, last = (("" if at is None else format_bytes(at).replace(" ", "")) for at in span)
    return f"{first}-{last}"
