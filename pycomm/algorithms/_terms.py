"""What a chunk holds while the simulator runs a plan: a contribution of a rank, or a sum in the order it was added."""

from __future__ import annotations

__all__ = ["Terms"]


class Terms:
    """All contributions and sums that occur, each with a number: equal terms have equal numbers.

    ``ranks[t]`` has a bit for each rank that contributed to term t; ``chunk[t]`` is the input chunk that t is of.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self.parts: list[tuple[int, ...]] = []  # (rank, chunk) of a contribution, the terms of a sum
        self.is_sum: list[bool] = []
        self.ranks: list[int] = []
        self.chunk: list[int] = []

    def contribution(self, rank: int, chunk: int) -> int:
        """Returns the number of input chunk ``chunk`` of ``rank``."""
        return self._number((-1 - rank, chunk), (rank, chunk), 1 << rank, chunk)

    def sum_of(self, terms: tuple[int, ...]) -> int | str:
        """Returns the number of the sum, or what is wrong with it."""
        known = self._numbers.get(terms)
        if known is not None:
            return known
        ranks, chunk = 0, self.chunk[terms[0]]
        for term in terms:
            if self.chunk[term] != chunk:
                return f"adds chunk {self.chunk[term]} to chunk {chunk}: {' + '.join(map(self.words, terms))}"
            if ranks & self.ranks[term]:
                return f"adds a contribution twice: {' + '.join(map(self.words, terms))}"
            ranks |= self.ranks[term]
        return terms[0] if len(terms) == 1 else self._number(terms, terms, ranks, chunk)

    def words(self, term: int) -> str:
        """The term as text; ``x2`` is the contribution of rank 2."""
        if term < 0:
            return "nothing"
        if not self.is_sum[term]:
            return f"x{self.parts[term][0]}"
        return " + ".join(
            f"({self.words(part)})" if self.is_sum[part] else self.words(part) for part in self.parts[term]
        )

    def _number(self, key: tuple[int, ...], parts: tuple[int, ...], ranks: int, chunk: int) -> int:
        number = self._numbers.setdefault(key, len(self.parts))
        if number == len(self.parts):
            self.parts.append(parts)
            self.is_sum.append(key[0] >= 0)
            self.ranks.append(ranks)
            self.chunk.append(chunk)
        return number
