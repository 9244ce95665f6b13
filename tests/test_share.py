"""The share study: what counts as a hit of the law, and its tables, from lines with known numbers."""

import numpy as np
import pytest

from paper import share
from paper.map import Key, Map
from pipeline.card import pace
from pipeline.report import Estimate

E_POS, E_NEG, P = 1.0, 4.0, 0.4  # p~* = 80%


def study(accuracy, places=("worded",), ratio=E_NEG):
    """A map of one card and three seeds an arm at each place; accuracy: of a share."""
    lines = {}
    for place in places:
        card = {"e_pos": E_POS, "e_neg": ratio, "ratio": ratio, "best_share": ratio / (1 + ratio), "correct": P}
        for seed in range(3):
            lines[Key(place, "card", seed)] = card | {"steps": 0}
            for arm, p_tilde in share.SHARES.items():
                after = {"correct": accuracy(p_tilde) + 0.001 * seed}
                lines[Key(place, arm, seed)] = {"after": after, "realised": p_tilde, "steps": 1}
    return Map(lines)


def test_the_law_hits_where_accuracy_follows_the_pace():
    judged = share.judge(study(lambda p_tilde: 0.2 * pace(P, p_tilde, E_POS, E_NEG)), "worded")
    assert (judged.arm, judged.best, judged.hits("the law"), judged.hits("always 20%")) == ("topr-80",) * 2 + (
        True,
        False,
    )
    assert judged.rank == pytest.approx(1.0)
    assert judged.predicted[0] == pytest.approx(0.8)


@pytest.mark.parametrize(("behind", "hits"), [(-0.03, False), (-0.01, False), (0.0, True)])
def test_a_prediction_must_be_close_and_not_told_from_the_best(behind, hits):
    """All seeds agree here, so that any difference is told from zero."""
    judged = share.judge(study(lambda p_tilde: 0.5 + behind * (p_tilde == 0.8)), "worded")
    assert judged.hits("the law") == hits
    noisy = judged._replace(behind={"the law": Estimate(behind, 0.02)})
    assert noisy.hits("the law") == (behind > -0.02)


def test_the_score_leaves_out_the_bases_on_which_the_law_was_found():
    table = study(lambda p_tilde: p_tilde, ("mistaken", "slips", "worded", "long"))
    tables = share.tables(table, {name: name for name in ("mistaken", "slips", "worded", "long")})
    assert tables["law"].rows[-1] == ["hits on the 2 others", *[""] * 5, "0", "0", "0"]
    assert [row[4] for row in tables["law"].rows[:-1]] == ["100%"] * 4
    assert tables["shares"].rows[0][1:] == [
        Estimate.over_seeds(p + 0.001 * np.arange(3)).text(100) for p in share.SHARES.values()
    ]
    assert len(share.panels(table, {"worded": "worded"})) == 3
