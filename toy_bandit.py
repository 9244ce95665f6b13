"""The paper's analysis on a bandit: Propositions 3.1 and 3.2, Appendices B and C, each statement checked and drawn.

    python toy_bandit.py                      # all claims: a table, and a figure for each, in 20 s on one core
    python toy_bandit.py unbounded recovery   # some of them
    python toy_bandit.py --out DIR --seed 1

Each statement names its condition. The exit status is 1 if a statement does not hold. The statements are in
paper/claims.py, the bandit in paper/bandit.py. Proposition 3.2, for one: after 0, 1,000, 2,000 and 3,000 steps TOPR's
objective is below the largest reward, which is 1; that of naive REINFORCE grows on.

>>> from paper.bandit import PRESETS, Bandit, ascend, objective, tensor
>>> bandit = Bandit(tensor([0.35, 0.25, 0.25, 0.15]), tensor([1.0, 1.0, -1.0, -1.0]))
>>> for limits in (PRESETS["topr"], PRESETS["reinforce"]):
...     path = ascend(bandit.mu.log(), bandit, limits, lr=4.0, steps=3000, keep=1000)
...     objective(path, bandit, limits).round(decimals=3)
tensor([0.2000, 0.9060, 0.9060, 0.9060], dtype=torch.float64)
tensor([2.0000e-01, 6.6048e+02, 1.3205e+03, 1.9805e+03], dtype=torch.float64)
"""

import json
import platform
import re
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
import tyro

from paper.claims import CLAIMS, Claim, check, to_table
from pipeline.plots import Panel, draw, save_figure
from pipeline.records import write_file
from pipeline.report import Table
from pipeline.runtime.processes import progress_bar


def numbers(panel: Panel) -> Table | None:
    """A panel's lines at five places: what is drawn, to be looked at before the verdict. None if no line has a name.

    >>> from pipeline.plots import Line
    >>> numbers(Panel("squares", "$x$", "y", [Line([0, 1, 2, 3, 4], [0, 1, 4, 9, 16], "$x^2$")])).rows
    [['x^2', '0', '1', '4', '9', '16']]
    """

    def plain(text: str) -> str:
        return re.sub(r"[$\\{}]|mathrm", "", text)

    lines = [line for line in panel.lines if line.kind == "line" and line.label]
    if not lines:
        return None
    drawn = [pd.Series(np.asarray(line.y), np.asarray(line.x)).sort_index() for line in lines]
    x = drawn[0].index[np.linspace(0, len(drawn[0]) - 1, 5).round().astype(int)]
    values = [[f"{y:,.4g}".replace("nan", "-") for y in np.interp(x, line.index, line)] for line in drawn]
    rows = [[plain(line.label), *of_line] for line, of_line in zip(lines, values, strict=True)]
    return Table([plain(f"{panel.title}: {panel.xlabel}"), *(f"{value:,.4g}" for value in x)], rows)


def main(
    claims: tyro.conf.Positional[tuple[Literal[*CLAIMS], ...]] = (), seed: int = 0, out: Path = Path("runs/bandit")
) -> None:
    """Print the figures' numbers and a table, and draw a figure for each claim; exit status 1 if one does not hold.

    Args:
        claims: which to check; none: all
        seed: seed of all random numbers
        out: folder for claims.json and the figures
    """
    torch.set_num_threads(1)  # the tensors are small: a second thread would mostly wait
    checked: dict[str, Claim] = {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in progress_bar(claims or CLAIMS, "checking", "claim"):
            checked[name] = check(name, seed)
            save_figure(draw(checked[name].panels, columns=3), out / f"{name}.png")
        record = {name: [row._asdict() for row in claim.statements] for name, claim in checked.items()}
        made_with = {"seed": seed, "torch": torch.__version__, "python": platform.python_version()}
        write_file(out / "claims.json", json.dumps(made_with | {"claims": record}, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        sys.exit(f"toy_bandit: --out {out}: {error}; choose another folder")
    width = None if sys.stdout.isatty() else 140
    for table in filter(None, (numbers(panel) for name in claims for panel in checked[name].panels)):
        table.print(width=width)
    to_table(checked).print(width=width)
    held = [row.holds for claim in checked.values() for row in claim.statements]
    print(f"{out}: {sum(held)} statements hold, {len(held) - sum(held)} do not")
    sys.exit(not all(held))


if __name__ == "__main__":
    tyro.cli(main, prog="toy_bandit.py", description=__doc__.partition("\n>>>")[0])
