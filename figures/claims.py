"""The paper's claims and their verdicts, from the numbers of the figures.

    python -m figures.claims    # writes them into README.md, results/README.md, results/claims.md

A claim of results/claims.json names the number that tests it (`figure`, `key`), or has it
(`number`), and the range that the paper expects (`expected`): "> 0", "< 0" or "within 2". `needs`
are preconditions: [figure, key, expected range, words]. `paper` is the paper's own number, `over`
what the values are if not seeds, and `within` their possible range.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERDICTS = ("reproduced", "contradicted", "inconclusive", "precondition not met", "not run")
USUAL_SEEDS = 5
TABLE = f"""|  | the paper's claim | ours (points, {USUAL_SEEDS} seeds) | verdict |
|---|---|---|---|
%s
| [Analysis](../docs/analysis.md) | Propositions 3.1 and 3.2, Appendices B and C \
| `python toy_bandit.py` checks each statement | **reproduced** |"""
Claim = dict[str, Any]
Load = Callable[[str], Any]  # name of a figure -> the content of its file


def load_results(name: str) -> Any:
    """The content of a file of results/."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def find_number(load: Load, figure: str, key: str) -> dict[str, Any] | None:
    """A number of a figure with its interval, or None; shares and their differences in points."""
    content = load(figure)
    number = content["shares"].get(key) or content["numbers"].get(key)
    if number is None or number["mean"] is None:
        return None
    scale = 100 if key in content["shares"] else 1
    # A number that needs no runs is exact.
    half_width = 0.0 if content["runs"] == 0 else number["half_width"]
    half_width = None if half_width is None else scale * half_width
    each = [scale * value for value in number["each"]]
    return {"mean": scale * number["mean"], "half_width": half_width, "each": each}


def expected_range(expected: str) -> tuple[float, float]:
    """The open interval of values that are as expected."""
    sign, number = expected.split()
    bound = float(number)
    return {">": (bound, math.inf), "<": (-math.inf, bound), "within": (-bound, bound)}[sign]


def judge(claim: Claim, load: Load) -> Claim:
    """The claim with its number, the verdict on it, and the first precondition that is not met.

    The verdict is on the number's whole 95 % interval; without one it is inconclusive.
    """
    judged = {"unit": "points", "needs": [], "number": None, "missing": "", **claim}
    if claim["key"] and judged["number"] is None:
        judged["number"] = find_number(load, claim["figure"], claim["key"])
    needed = [find_number(load, figure, key) for figure, key, *_ in judged["needs"]]
    if judged["number"] is None or None in needed:
        return judged | {"verdict": "not run"}
    for value, (_, _, expected, words) in zip(needed, judged["needs"], strict=True):
        low, high = expected_range(expected)
        if not low < value["mean"] < high:
            return judged | {"verdict": "precondition not met", "missing": f" (missing: {words})"}
    low, high = expected_range(claim["expected"])
    half_width = judged["number"]["half_width"]
    half_width = math.inf if half_width is None else half_width
    lower = judged["number"]["mean"] - half_width
    upper = judged["number"]["mean"] + half_width
    verdict = "reproduced" if low < lower and upper < high else "inconclusive"
    return judged | {"verdict": "contradicted" if upper < low or high < lower else verdict}


def number_text(claim: Claim) -> str:
    """The number of a judged claim with its interval, or its values if that is impossible."""
    if claim["number"] is None:
        return "not run yet" if claim["key"] else "needs GPUs"
    mean, half_width, each = claim["number"].values()
    half_width = half_width or 0.0
    digits = 1 if claim["unit"] else 2
    text = f"{mean:.{digits}f} ± {half_width:.{digits}f}"
    low, high = claim.get("within", (-math.inf, math.inf))
    if mean - half_width < low or high < mean + half_width:
        text = ", ".join(f"{value:.{digits}f}" for value in each)
    return f"{text} {claim['unit']}".removesuffix("points").rstrip()


def claims_table(claims: list[Claim], load: Load) -> str:
    """A row for each judged claim; a figure or study is named in its first row only.

    Brackets have the best learning rate if the claim depends on it, and an unusual number of seeds.
    """
    rows = []
    links = [""]
    for claim in claims:
        name = claim.get("study", claim["figure"]).replace("_", " ")
        name = name.replace("fig", "Figure ").replace("table", "Table ")
        page = "studies/README.md" if "study" in claim else "README.md"
        links.append(f"[{name}]({page}#{name.lower().replace(' ', '-')})")
        details = []
        if "rate" in claim:
            tried = load(claim["figure"])["learning_rates"][claim["rate"]]
            best = float(max(tried, key=tried.__getitem__))
            details.append(f"{best:.1e}".replace("e-0", "e-").replace(".0e", "e"))
        count = len(claim["number"]["each"]) if claim["number"] else 1
        if count not in (1, USUAL_SEEDS):
            details.append(f"{count} {claim.get('over', 'seeds')}")
        first = "" if links[-1] == links[-2] else links[-1]
        paper = f" (paper: {claim['paper']})" if "paper" in claim else ""
        number = f"{number_text(claim)} ({', '.join(details)})".removesuffix(" ()")
        verdict = f"**{claim['verdict']}**{claim['missing']}"
        rows.append(f"| {first} | {claim['claim']}{paper} | {number} | {verdict} |")
    return TABLE % "\n".join(rows)


def numbers_list(claims: list[Claim], figure: str) -> str:
    """The numbers of a figure's judged claims, a line for each verdict, reproduced ones last."""
    lines = []
    for verdict in (*VERDICTS[1:], VERDICTS[0]):
        chosen = [each for each in claims if (each["figure"], each["verdict"]) == (figure, verdict)]
        texts = [f"{claim['short']}: {number_text(claim)}" for claim in chosen if claim["key"]]
        if texts:
            lines.append(f"- **{verdict}:** {'; '.join(texts)}")
    return "\n".join(lines)


def main() -> None:
    """Write the blocks between `<!-- table:NAME -->` and `<!-- end -->` of the pages."""
    claims = [judge(claim, load_results) for claim in load_results("claims")]
    verdicts = ["reproduced", *(claim["verdict"] for claim in claims)]  # the first: the analysis
    counts = [f"{verdicts.count(each)} **{each}**" for each in VERDICTS if each in verdicts]
    blocks = {"counted": "; ".join(counts), "findings": claims_table(claims, load_results)}
    for figure in {claim["figure"] for claim in claims}:
        blocks[f"numbers {figure}"] = numbers_list(claims, figure)
    for page in ("README.md", "results/README.md", "results/claims.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, block in blocks.items():
            pattern = rf"(<!-- table:{name} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, rf"\1\n{block}\n\n\2", text, flags=re.DOTALL)
        (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
