"""How fast it is, and what it needs: `python -m benchmarks NAME` asks one question. Here is what all of them share."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """What every benchmark can be told; every default is ours."""

    rounds: int = 5
    """times that each side is measured"""
    small: bool = False
    """at a small size, to see that it works"""
    seed: int = 0
    """seed of everything that is drawn"""
    out: Path = Path("runs/bench")
    """folder to write NAME.json into"""
