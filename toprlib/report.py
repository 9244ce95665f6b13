"""A result as people read it: an estimate with its interval, and a table for a terminal, a page or a file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table as Printed

# 97.5% quantiles of Student's t for 2 to 10 values; that of 10 serves more values too, and errs on the safe side.
STUDENT = dict(
    zip(range(2, 11), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), strict=True)
)


class Estimate(NamedTuple):
    """A mean, half of its 95% interval, None where it has none, and the values that it is the mean of, where kept."""

    mean: float
    half_width: float | None = None
    each: tuple[float, ...] = ()

    @classmethod
    def over_seeds(cls, values: Iterable[float]) -> "Estimate":
        """The mean over seeds, with the interval of Student's t; one seed has no interval.

        >>> Estimate.over_seeds([1.0, 2.0, 3.0]).text(digits=2)
        '2.00 ± 2.48'
        """
        each, half_width = tuple(map(float, values)), None
        if len(each) > 1:
            half_width = STUDENT[min(len(each), 10)] * float(
                np.std(each, ddof=1) / len(each) ** 0.5
            )
        return cls(float(np.mean(each)), half_width, each)

    @classmethod
    def over_samples(cls, values: Sequence[float]) -> "Estimate":
        """The mean of independent values ± 2 standard errors; a single value has no interval."""
        each = np.asarray(values, dtype=float)
        se = float(each.std(ddof=1) / np.sqrt(len(each))) if len(each) > 1 else None
        return cls(float(each.mean()), None if se is None else 2 * se)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "Estimate":
        """An estimate as results.json has it: `mean`, and `se`, half of the half-width or None.

        >>> Estimate.read({"mean": 0.5, "se": 0.01})
        Estimate(mean=0.5, half_width=0.02, each=())
        """
        return cls(entry["mean"], None if entry["se"] is None else 2 * entry["se"])

    def record(self) -> dict[str, float | None]:
        """The estimate of a single run for results.json: `mean`, and `se`, the standard error."""
        return {"mean": self.mean, "se": None if self.half_width is None else self.half_width / 2}

    def text(
        self,
        scale: float = 1,
        digits: int = 1,
        unit: str = "",
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> str:
        """The mean ± half of the interval, both times `scale`, and the unit behind them.

        within: which values are possible; where the interval holds others, the values themselves are told.

        >>> Estimate(0.5, 0.02).text(100, unit=" %"), Estimate(0.5).text(digits=3)
        ('50.0 ± 2.0 %', '0.500')
        >>> Estimate.over_seeds([0.0, 0.04, 0.01]).text(100, unit=" %", within=(0, 1))
        '0.0, 4.0, 1.0 %'
        """
        low, high = (self.mean + sign * (self.half_width or 0) for sign in (-1, 1))
        if self.each and not within[0] <= low <= high <= within[1]:
            return f"{', '.join(f'{scale * value:.{digits}f}' for value in self.each)}{unit}"
        half = "" if self.half_width is None else f" ± {scale * self.half_width:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{half}{unit}"

    def spread(self, digits: int = 1) -> str:
        """The median of the values and their range, for what a mean says little about, such as maxima.

        >>> Estimate.over_seeds([2.0, 90.0, 5.0]).spread()
        '5.0 (2.0 to 90.0)'
        """
        return f"{np.median(self.each):.{digits}f} ({min(self.each):.{digits}f} to {max(self.each):.{digits}f})"


class Table(NamedTuple):
    """Rows of text under a head; a file of results keeps it as JSON, and a page places it as Markdown."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self) -> None:
        """Print it to the terminal, or in a notebook."""
        printed = Printed(*self.head)
        for row in self.rows:
            printed.add_row(*row)
        Console(markup=False, emoji=False).print(printed)

    def markdown(self) -> str:
        r"""The table in Markdown.

        >>> print(Table(["a", "b"], [["1", "|x|\n"]]).markdown())
        | a | b |
        |---|---|
        | 1 | \|x\|<br> |
        """
        lines = [
            [str(c).replace("|", "\\|").replace("\n", "<br>") for c in row]
            for row in (self.head, *self.rows)
        ]
        head, *rows = (f"| {' | '.join(line)} |" for line in lines)
        return "\n".join([head, f"|{'---|' * len(self.head)}", *rows])
