"""How fast it is, and what it needs: `python -m benchmarks NAME` asks one question. Here is what they can be told."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """What every benchmark can be told; every default is ours."""

    rounds: int = 5  # times that each side is measured; fake_8b_step counts, and measures nothing
    small: bool = False  # at a small size, to see that it works; fake_8b_step: with eight layers of the 8B model
    all: bool = False
    """fake_8b_step: also with TRL's and verl's settings, and other models and GPUs, for the tables of the pages"""
    seed: int = 0  # seed of everything that is drawn
    out: Path = Path("runs/bench")  # folder to write NAME.json into
