"""Results as people read them: an estimate with its interval, and a table."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

COUNTS = ("samples_seen", "questions", "samples_per_question")  # numbers of an entry, no metrics

# The 97.5 % quantile of Student's t for n values, n - 1 degrees of freedom. More than 13 values use
# the quantile of 13, which makes their interval slightly too wide.
STUDENT_T = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
    11: 2.228,
    12: 2.201,
    13: 2.179,
}


class Estimate(NamedTuple):
    """A mean with half the width of its 95 % interval.

    half_width: None if there is no interval, as for a single value. each: the values that were
    averaged, where they are kept.
    """

    mean: float
    half_width: float | None = None
    each: tuple[float, ...] = ()

    @classmethod
    def over_seeds(cls, values: Iterable[float]) -> "Estimate":
        """The mean over a few seeds and Student's t interval; one seed has no interval.

        >>> Estimate.over_seeds([1.0, 2.0, 3.0]).text(digits=2)
        '2.00 ± 2.48'
        """
        each = tuple(float(value) for value in values)
        mean = float(np.mean(each))
        n = len(each)
        if n == 1:
            return cls(mean, None, each)
        standard_error = float(np.std(each, ddof=1) / n**0.5)
        return cls(mean, STUDENT_T[min(n, 13)] * standard_error, each)

    @classmethod
    def over_samples(cls, values: Sequence[float]) -> "Estimate":
        """The mean of many independent values ± 2 standard errors; one value has no interval.

        >>> Estimate.over_samples([1.0, 3.0])
        Estimate(mean=2.0, half_width=2.0, each=())
        """
        n = len(values)
        mean = float(np.mean(values))
        if n == 1:
            return cls(mean)
        standard_error = float(np.std(values, ddof=1) / n**0.5)
        return cls(mean, 2 * standard_error)

    @classmethod
    def from_json(cls, entry: dict[str, float | None]) -> "Estimate":
        """An estimate of results.json: `mean` and `se`, the standard error (None: no interval).

        >>> Estimate.from_json({"mean": 0.5, "se": 0.01})
        Estimate(mean=0.5, half_width=0.02, each=())
        """
        standard_error = entry["se"]
        half_width = None if standard_error is None else 2 * standard_error
        return cls(entry["mean"], half_width)

    def to_json(self) -> dict[str, float | None]:
        """The estimate for results.json, where an interval is ± 2 standard errors.

        >>> Estimate(0.5, 0.02).to_json()
        {'mean': 0.5, 'se': 0.01}
        """
        standard_error = None if self.half_width is None else self.half_width / 2
        return {"mean": self.mean, "se": standard_error}

    def text(
        self,
        scale: float = 1,
        digits: int = 1,
        unit: str = "",
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> str:
        """The mean ± half the interval, both multiplied by `scale`, then the unit.

        within: the range of possible values, before scaling. If the interval leaves this range, the
        text lists the single values instead.

        >>> Estimate(0.5, 0.02).text(100, unit=" %"), Estimate(0.5).text(digits=3)
        ('50.0 ± 2.0 %', '0.500')
        >>> Estimate.over_seeds([0.0, 0.04, 0.01]).text(100, unit=" %", within=(0, 1))
        '0.0, 4.0, 1.0 %'
        """
        half_width = self.half_width or 0.0
        lowest, highest = within
        is_possible = lowest <= self.mean - half_width and self.mean + half_width <= highest
        if self.each and not is_possible:
            values = [f"{scale * value:.{digits}f}" for value in self.each]
            return ", ".join(values) + unit
        mean = f"{scale * self.mean:.{digits}f}"
        if self.half_width is None:
            return mean + unit
        return f"{mean} ± {scale * self.half_width:.{digits}f}{unit}"

    def spread(self, digits: int = 1) -> str:
        """The median and the range of the values, for quantities whose mean says little.

        >>> Estimate.over_seeds([2.0, 90.0, 5.0]).spread()
        '5.0 (2.0 to 90.0)'
        """
        median = f"{np.median(self.each):.{digits}f}"
        return f"{median} ({min(self.each):.{digits}f} to {max(self.each):.{digits}f})"


class Table(NamedTuple):
    """A header and rows of text. Files of results store it as JSON, pages as Markdown."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self) -> None:
        """Print the table to the terminal or in a notebook."""
        table = RichTable()
        for name in self.head:
            table.add_column(name, overflow="fold")  # a long word is divided, not cut
        for row in self.rows:
            table.add_row(*row)
        # Without markup and emoji: a cell such as "[1/3]" or ":smile:" is printed as it is.
        Console(markup=False, emoji=False).print(table)

    def markdown(self) -> str:
        r"""The table in Markdown.

        >>> print(Table(["a", "b"], [["1", "|x|\n"]]).markdown())
        | a | b |
        |---|---|
        | 1 | \|x\|<br> |
        """
        lines = []
        for row in (self.head, *self.rows):
            # A bar would start a new cell and a line break a new row.
            cells = [str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        separator = f"|{'---|' * len(self.head)}"
        return "\n".join([lines[0], separator, *lines[1:]])


def split_entry(entry: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The names of the outcomes and of the metrics in an entry of results.json.

    >>> split_entry({"right": 0.25, "wrong": 0.75, "maj@4": {"mean": 0.5, "se": None}})
    (['right', 'wrong'], ['maj@4'])
    """
    metrics = [name for name, value in entry.items() if isinstance(value, dict)]
    outcomes = [name for name in entry if name not in metrics and name not in COUNTS]
    return outcomes, metrics
