"""The paper's analysis on a bandit: Propositions 3.1 and 3.2, Appendices B and C, each statement checked and drawn.

    python toy_bandit.py                      # all claims: a table, and a figure for each, in 20 s on one core
    python toy_bandit.py unbounded recovery   # some of them
    python toy_bandit.py --out DIR --seed 1

Each statement names its condition. The exit status is 1 if a statement does not hold. The statements are in
paper/claims.py, the bandit in paper/bandit.py.
"""

import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from paper.claims import CLAIMS, Claim, check, to_table
from pipeline.plots import draw, save_figure
from pipeline.records import write_file
from pipeline.runtime.processes import progress_bar


@dataclass(frozen=True)
class Settings:
    """The settings of the command."""

    claims: tyro.conf.Positional[tuple[Literal[*CLAIMS], ...]] = ()
    """which to check; none: all"""
    seed: int = 0
    """seed of all random numbers"""
    out: Path = Path("runs/bandit")
    """folder for claims.json and the figures"""


def main() -> None:
    """The command line: a table, a figure for each claim, and exit status 1 if a statement does not hold."""
    settings = tyro.cli(Settings, prog="toy_bandit.py", description=__doc__)
    torch.set_num_threads(1)  # the tensors are small: a second thread would mostly wait
    claims: dict[str, Claim] = {}
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
        for name in progress_bar(settings.claims or CLAIMS, "checking", "claim"):
            claims[name] = check(name, settings.seed)
            save_figure(draw(claims[name].panels, columns=3), settings.out / f"{name}.png")
        record = {name: [row._asdict() for row in claim.statements] for name, claim in claims.items()}
        made_with = {"seed": settings.seed, "torch": torch.__version__, "python": platform.python_version()}
        content = json.dumps(made_with | {"claims": record}, indent=2, ensure_ascii=False)
        write_file(settings.out / "claims.json", content + "\n")
    except OSError as error:
        sys.exit(f"toy_bandit: --out {settings.out}: {error}; choose another folder")
    to_table(claims).print(width=None if sys.stdout.isatty() else 140)
    held = [row.holds for claim in claims.values() for row in claim.statements]
    print(f"{settings.out}: {sum(held)} statements hold, {len(held) - sum(held)} do not")
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
