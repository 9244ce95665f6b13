"""README's result sentences: every number and verdict follows from the files of results/.

The numbers are recomputed from the values of single seeds. The wording is not tested.
"""

import re
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from docs_helpers import at_rate, read_page, samples_by_run

from scripts.make_tables import load

# A mean and half of its interval.
NUMBER = re.compile(r"(-?\d+\.\d+) ± (\d+\.\d+)")
# Every number has its unit, or is followed by another number of its list.
UNIT = re.compile(r"± \d+\.\d+(?: (%|points)|,? (?:and )?(?:\(inconclusive\) )?(?=-?\d+\.\d+ ±))")
INCONCLUSIVE = "inconclusive"

# Number of seeds -> 97.5 % quantile of Student's t, from a table of the distribution.
QUANTILES = {5: 2.7764, 8: 2.3646, 13: 2.1788}


def each_seed(file: str, key: str) -> np.ndarray:
    """A number of a file of results/ or studies/ in each seed, in per cent."""
    return 100 * np.array(load(file)["shares"][key]["each"])


def robustness(method: str, setting: str = "three times the rate") -> np.ndarray:
    return each_seed("robustness", f"{method}, {setting}: correct at the end")


def fig5(share: str, rate: str = "", positive: str = "10%") -> np.ndarray:
    return each_seed("fig5", f"{positive} positive, p~ = {share}{rate}")


# Bases, sets and methods of the study rate_and_share.
NATURAL = ("two_thirds", "natural")
TEN = ("two_thirds", "10 % positive")
NATURAL_46 = ("worded", "natural")
TEN_46 = ("worded", "10 % positive")
SFT_NATURAL = ("sft", "positives only")
TOPR_NATURAL = ("topr", "70 %", "80 %", "90 %")
TOPR_TEN = ("10 %", "20 %", "50 %", "80 %")


def gain(base_and_set: tuple[str, str], arm: str, lr: float, metric: str = "right") -> np.ndarray:
    """TOPR less SFT with as many steps at SFT's best rate, in each seed."""
    sft = "sft" if "natural" in base_and_set else "100 %"
    return at_rate(base_and_set, arm, lr, metric) - at_rate(base_and_set, sft, 1e-4, metric)


def tuned(base_and_set: tuple[str, str], arms: Sequence[str], metric: str = "right") -> np.ndarray:
    """A metric in each seed, at the (arm, rate) that is best in the other seeds.

    Best: with the most right samples on the other half of the problems.
    """
    all_runs = samples_by_run("right")
    runs = [run for run in all_runs if run[:2] == base_and_set and run[2] in arms]
    right = np.stack([all_runs[run] for run in runs])  # (runs, seeds, problems)
    values = np.stack([samples_by_run(metric)[run] for run in runs])
    is_odd = np.arange(right.shape[2]) % 2 == 1
    results = []
    for seed in range(right.shape[1]):
        is_other = np.arange(right.shape[1]) != seed
        halves = []
        for judged in (is_odd, ~is_odd):
            means = right[:, is_other][:, :, ~judged].mean(axis=(1, 2))
            halves.append(values[means.argmax(), seed, judged].mean())
        results.append(np.mean(halves))
    return np.array(results)


SECOND = ", second best rate"
OVER_ITERATIONS = "uniform - positives, as many steps: pass@1, mean of iterations 1 to 3"

# Label of a bullet -> its numbers in their order: accuracies, or differences of the one that the
# sentence names first.
ACCURACIES = {
    "Stability.": [
        robustness("TOPR"),
        robustness("SFT on positives"),
        robustness("naive REINFORCE"),
        robustness("DPO"),
        robustness("PPO"),
        robustness("SFT on positives", "best rate"),
        robustness("PPO", "best rate"),
    ],
}
DIFFERENCES = {
    "Rare right answers.": [
        each_seed("fig6", "TOPR - TIS, p~ = 1%"),
        each_seed("fig6", "TOPR - TIS, p~ = 1%, seeds 8 to 12"),
        -each_seed("fig6", "TOPR - base, p~ = 1%"),
    ],
    "With a tenth of the answers right, wrong ones help, if there is a baseline.": [
        tuned(TEN, TOPR_TEN) - tuned(TEN, ["100 %"]),
        tuned(TEN_46, TOPR_TEN) - tuned(TEN_46, ["100 %"]),
        tuned(TEN, ["10 %"]) - tuned(TEN, ["100 %"]),
        tuned(TEN_46, ["100 %"]) - tuned(TEN_46, ["10 %"]),
    ],
    "With all samples, they help the weaker model.": [
        tuned(NATURAL, TOPR_NATURAL) - tuned(NATURAL, SFT_NATURAL),
        tuned(NATURAL_46, TOPR_NATURAL) - tuned(NATURAL_46, SFT_NATURAL),
        gain(NATURAL, "90 %", 1e-4),
        gain(NATURAL_46, "70 %", 1e-4),
        gain(NATURAL, "topr", 1e-4),
        gain(NATURAL_46, "topr", 1e-4),
        each_seed("fig8", OVER_ITERATIONS),
        each_seed("fig8", f"{OVER_ITERATIONS}, second best rate"),
        each_seed("fig8", f"{OVER_ITERATIONS}, own rate"),
    ],
    "Majority votes, unseen kinds of problems.": [
        tuned(TEN, TOPR_TEN, "majority") - tuned(TEN, ["100 %"], "majority"),
        tuned(TEN_46, TOPR_TEN, "majority") - tuned(TEN_46, ["100 %"], "majority"),
        tuned(NATURAL, TOPR_NATURAL, "majority") - tuned(NATURAL, SFT_NATURAL, "majority"),
        tuned(NATURAL_46, TOPR_NATURAL, "majority") - tuned(NATURAL_46, SFT_NATURAL, "majority"),
    ],
    "A real model of 135 million parameters.": [
        each_seed("room_to_learn", "TOPR - SFT, as many steps: pass@1"),
        each_seed("room_to_learn", "TOPR - SFT, as many steps: T = 0"),
        each_seed("real-llm", "TOPR - positives only"),
    ],
}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and half of Student's 95 % interval."""
    n = len(values)
    half_width = QUANTILES[n] * np.std(values, ddof=1) / n**0.5
    return float(np.mean(values)), float(half_width)


def to_text(number: float, decimals: int) -> str:
    """A rounded number; a tie such as 15.25, which floats only approximate, is rounded up."""
    exact = Decimal(f"{number:.9f}")
    return str(exact.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP))


def check_numbers(found: Sequence[Sequence[str]], expected: Sequence[np.ndarray]) -> None:
    """Compare printed means and intervals with those of values over seeds."""
    for (mean, half_width), each in zip(found, expected, strict=True):
        decimals = len(mean.partition(".")[2])
        assert [mean, half_width] == [to_text(number, decimals) for number in interval(each)]


def read_bullets() -> dict[str, str]:
    """The bullets of README's section on results, by their labels."""
    section = read_page("README.md").partition("\n## Results\n")[2].partition("\n## ")[0]
    bullets = re.findall(r"^- \*\*(.*?)\*\*(.*?)(?=^- |\n\n)", section, re.DOTALL | re.MULTILINE)
    return {label: " ".join(text.split()) for label, text in bullets}


def sentences_with_numbers(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The sentences of a text, each with its numbers."""
    sentences = re.split(r"(?<=[a-z)%])\. ", text)
    return [(sentence, NUMBER.findall(sentence)) for sentence in sentences]


def test_tis_and_plain_is_end_at_74_to_78_percent():
    for method in ("TIS", "plain IS"):
        assert 73.5 <= robustness(method).mean() <= 78.5


def test_own_rates_are_1e_4_for_sft_and_ppo_and_at_most_3e_5_for_the_others():
    table = load("robustness")["tables"]["robustness"]
    best = {row[0]: float(row[-1]) for row in table["rows"]}
    assert best.pop("SFT on positives") == best.pop("PPO") == 1e-4
    assert max(best.values()) == 3e-5


def test_each_bullet_is_checked():
    assert set(read_bullets()) == set(ACCURACIES) | set(DIFFERENCES)


def test_no_other_number_of_the_section_has_an_interval():
    section = read_page("README.md").partition("\n## Results\n")[2].partition("\n## ")[0]
    in_bullets = sum(text.count("±") for text in read_bullets().values())
    # One ± explains what it stands for.
    assert section.count("±") == in_bullets + 1


@pytest.mark.parametrize("label", [*ACCURACIES, *DIFFERENCES])
def test_numbers_and_intervals_are_those_of_the_files(label):
    unit = "%" if label in ACCURACIES else "points"
    values = ACCURACIES.get(label, []) + DIFFERENCES.get(label, [])
    text = read_bullets()[label]
    check_numbers(NUMBER.findall(text), values)
    units = UNIT.findall(text)
    assert len(units) == len(values)
    assert set(units) - {""} == {unit}


@pytest.mark.parametrize("label", DIFFERENCES)
def test_a_sentence_says_inconclusive_where_an_interval_contains_zero(label):
    remaining = list(DIFFERENCES[label])
    for sentence, numbers in sentences_with_numbers(read_bullets()[label]):
        of_sentence = [interval(remaining.pop(0)) for _ in numbers]
        contains_zero = [abs(mean) <= half_width for mean, half_width in of_sentence]
        assert (INCONCLUSIVE in sentence) == any(contains_zero), sentence
    assert not remaining


def test_advice_on_rate_and_share_has_the_numbers_of_the_files():
    page = read_page("docs/in_your_trainer.md")
    section = page.partition("\n## Learning rate and share")[2].partition("\n## ")[0]
    sft_fig5 = fig5("100%", SECOND)
    expected = []
    for share in ("50 %", "20 %", "10 %"):
        for lr in (1e-4, 3e-5):
            for base_and_set in (TEN, TEN_46):
                expected.append(gain(base_and_set, share, lr))
                expected.append(gain(base_and_set, share, lr, "majority"))
            rate = SECOND if lr == 1e-4 else ""
            expected.append(fig5(share.replace(" ", ""), rate) - sft_fig5)
    expected.append(fig5("50%", SECOND, "50%") - fig5("100%", SECOND, "50%"))
    for share in ("90 %", "70 %", "topr"):
        for base_and_set in (NATURAL, NATURAL_46):
            expected.append(gain(base_and_set, share, 1e-4))
            expected.append(gain(base_and_set, share, 1e-4, "majority"))
    expected += [
        at_rate(TEN_46, "20 %", 3e-5) - at_rate(TEN_46, "100 %", 3e-5),
        gain(TEN, "100 %", 3e-5, "majority"),
        at_rate(TEN_46, "10 %", 3e-5, "majority") - at_rate(TEN_46, "10 %", 1e-4, "majority"),
        -gain(TEN_46, "100 %", 3e-5, "majority"),
        at_rate(NATURAL, "90 %", 1e-4) - at_rate(NATURAL, "90 %", 3e-5),
        at_rate(NATURAL_46, "70 %", 1e-4) - at_rate(NATURAL_46, "70 %", 3e-5),
        each_seed("room_to_learn", "TOPR, share of 70 % - SFT, as many steps: pass@1"),
        each_seed("room_to_learn", "TOPR - SFT, as many steps: pass@1"),
    ]
    check_numbers(NUMBER.findall(section), expected)


def test_sentences_are_recognised():
    text = "A ends 1.0 ± 0.5 points above B (inconclusive). At 1e-4 it ends 2.0 ± 0.1 % below. End."
    found = sentences_with_numbers(text)
    assert [numbers for _, numbers in found] == [
        [("1.0", "0.5")],
        [("2.0", "0.1")],
        [],
    ]
