"""The gradient of the paper's loss, by hand."""

import math

from topr_conformance.losses import LossInputs


def paper_neg_grad(inputs: LossInputs) -> list[list[float]]:
    """The paper's `neg_grad`, times B: R [pi/mu]_a^b / length on each token, 0 on padding.

    Loops over numbers, without torch: an oracle must not share code with what it checks.

    >>> import torch
    >>> token_logp = torch.tensor([[-2.0, -2.0]])
    >>> token_logmu = torch.tensor([[-1.5, -1.5]])
    >>> inputs = LossInputs(token_logp, token_logmu, torch.tensor([-1.0]), torch.ones(1, 2))
    >>> paper_neg_grad(inputs)  # -e^-1 / 2
    [[-0.18393972058572117, -0.18393972058572117]]
    """
    rows = zip(*[column.double().tolist() for column in inputs], strict=True)
    neg_grads = []
    for token_logp, token_logmu, reward, mask in rows:
        log_ratio = 0.0
        for logp, logmu, inside in zip(token_logp, token_logmu, mask, strict=True):
            if inside:
                log_ratio += logp - logmu
        weight = 1.0
        if reward < 0 and log_ratio < 0:
            weight = math.exp(log_ratio)
        of_token = reward * weight / sum(mask)
        neg_grads.append([of_token if inside else 0.0 for inside in mask])
    return neg_grads
