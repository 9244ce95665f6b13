"""Pictures of a run: colours told apart by the colour-blind (Okabe and Ito), and by line style in grey."""

from collections.abc import Sequence
from pathlib import Path

STYLES = {  # colour, line, marker
    "correct": ("#009E73", "-", "o"),
    "incorrect": ("#56B4E9", "--", "s"),
    "invalid": ("#D55E00", ":", "^"),
}


def plot_curve(points: Sequence[dict], title: str, path: Path) -> None:
    """Accuracy, and the three outcomes, over training.

    points: the `curve` of results.json: samples_seen, the outcome shares, and "pass@1" with its mean and se.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    seen = [point["samples_seen"] for point in points]
    mean = [100 * point["pass@1"]["mean"] for point in points]
    spread = [200 * point["pass@1"]["se"] for point in points]
    colour, line, marker = STYLES["correct"]
    left.errorbar(seen, mean, yerr=spread, color=colour, linestyle=line, marker=marker, markersize=4, capsize=3)
    left.set(xlabel="samples trained on", ylabel="pass@1 (%), ± 2 SE", title=title)
    for outcome, (colour, line, marker) in STYLES.items():
        shares = [100 * point[outcome] for point in points]
        right.plot(seen, shares, color=colour, linestyle=line, marker=marker, markersize=4, label=outcome)
    right.set(xlabel="samples trained on", ylabel="share of completions (%)", title="outcomes", ylim=(-3, 103))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
