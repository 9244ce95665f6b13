"""A loss in another form is called in it: names and order of arguments, layouts, masks, outputs."""

import pytest
import torch
from loss_builders import method_loss, tapered, total

from topr_conformance import InputError, LossInputs, adapted, compare, identify, neg_grad, variants
from topr_conformance.adapters import argument_of
from topr_conformance.variants import paper


# ---- losses as trainers have them ----------------------------------------------------------------
def as_in_verl(old_log_prob, log_prob, advantages, response_mask, config=None):
    """Advantages (B, T), a mask of booleans; it returns metrics, too."""
    logp = log_prob.masked_fill(~response_mask, 0)
    logmu = old_log_prob.masked_fill(~response_mask, 0)
    return paper(logp, logmu, advantages[:, 0], response_mask), {"metric": 0.0}


def with_logmu_first(old_log_prob, log_prob, adv, mask):
    return paper(log_prob, old_log_prob, adv, mask)


def with_behavior_and_returns(response_mask, returns, behavior_logprobs, policy_logprobs):
    return paper(policy_logprobs, behavior_logprobs, returns, response_mask)


def with_sampling_and_scores(scores, sampling_logp, new_logp, loss_mask):
    return paper(new_logp, sampling_logp, scores, loss_mask)


def with_mu_and_pi(mu, pi, rewards, attention_mask):
    return paper(pi, mu, rewards, attention_mask)


def of_completions(reward, mu, logp, n_tok):
    """One number per completion, (B,)."""
    weight = torch.where(reward < 0, (logp - mu).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * logp / n_tok).mean()


def sigmoid_of_completions(logp, logmu, reward, n_tok):
    return -(reward * logp * (logp - logmu).sigmoid().detach() / n_tok).mean()


def packed(logp, logmu, reward, lengths):
    """All tokens, (N,), laid end to end."""
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    of_completion = torch.zeros_like(reward).index_add(0, rows, logp)
    mu_of_completion = torch.zeros_like(reward).index_add(0, rows, logmu)
    return of_completions(reward, mu_of_completion, of_completion, lengths)


def packed_with_cumulative_lengths(logp, logmu, reward, cu_seqlens):
    return packed(logp, logmu, reward, cu_seqlens.diff())


def per_token_with_advantages(logp, logmu, advantages, mask):
    return variants.per_token(logp, logmu, advantages[:, 0], mask)


def time_first(logp, logmu, reward, mask):
    return paper(logp.T, logmu.T, reward, mask.T)


def with_boolean_mask(logp, logmu, reward, mask):
    return paper(logp.where(mask, 0), logmu.where(mask, 0), reward, mask)


def with_integer_mask(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, torch.arange(2)[mask])


def of_one_dictionary(batch):
    columns = [batch[name] for name in ("logp", "old_logp", "advantages", "completion_mask")]
    return paper(*columns)


def of_one_dictionary_by_get(batch):
    return paper(batch.get("logp"), batch["logmu"], batch.get("reward"), batch["mask"])


class Module(torch.nn.Module):
    def forward(self, old_log_probs, log_probs, rewards, action_mask):
        return paper(log_probs, old_log_probs, rewards, action_mask)


# ---- other outputs -------------------------------------------------------------------------------
def returning_a_dictionary(logp, logmu, reward, mask):
    return {"loss": paper(logp, logmu, reward, mask)}


def returning_a_list(logp, logmu, reward, mask):
    return [paper(logp, logmu, reward, mask), "metrics"]


def returning_values_of_tokens(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, tapered(logp, logmu, mask), 1.0).detach()
    return -(weight * reward)[:, None] * logp


def returning_values_of_completions(logp, logmu, reward, mask):
    return total(returning_values_of_tokens(logp, logmu, reward, mask), mask) / mask.sum(1)


FORMS = [  # (the verdict, the form in which the loss is called, the loss)
    ("paper", "arguments by name + advantages + boolean mask + first output", as_in_verl),
    ("paper", "arguments by name", with_logmu_first),
    ("paper", "arguments by name", with_behavior_and_returns),
    ("paper", "arguments by name", with_sampling_and_scores),
    ("paper", "arguments by name", with_mu_and_pi),
    ("paper", "arguments by name + sequences", of_completions),
    ("unknown", "sequences", sigmoid_of_completions),
    ("paper", "packed", packed),
    ("paper", "cumulative lengths + packed", packed_with_cumulative_lengths),
    ("per-token", "advantages", per_token_with_advantages),
    ("paper", "time first", time_first),
    ("paper", "boolean mask", with_boolean_mask),
    ("paper", "integer mask", with_integer_mask),
    ("paper", "one dictionary", of_one_dictionary),
    ("paper", "one dictionary", of_one_dictionary_by_get),
    ("paper", "arguments by name", Module()),
    ("paper", "none", method_loss),
    ("paper", "output 'loss'", returning_a_dictionary),
    ("paper", "first output", returning_a_list),
    ("paper", "mean over completions", returning_values_of_completions),
    ("paper", "tokens", returning_values_of_tokens),
]


@pytest.mark.parametrize(("verdict", "form", "loss"), FORMS)
def test_a_loss_is_called_in_its_form(verdict, form, loss):
    report = identify(loss)
    assert (report.variant, report.adapter) == (verdict, form)
    assert (compare(adapted(loss, form), 50) is None) == (verdict == "paper")


ARGUMENT_NAMES = {  # which argument -> names of parameters that stand for it
    "logp": ["logp", "token_logp", "log_prob", "new_logprobs", "current_lp", "policy_lp", "pi"],
    "logmu": ["logmu", "token_logmu", "old_log_prob", "behavior_logp", "sampling_logprobs"],
    "reward": ["reward", "rewards", "advantages", "adv", "returns", "scores"],
    "mask": ["mask", "response_mask", "completion_mask", "lengths", "cu_seqlens", "n_tok"],
    "": ["x", "config", "kwargs"],
}
ARGUMENT_NAMES["logmu"] += ["rollout_log_probs", "sample_lp", "mu"]
ARGUMENT_NAMES["mask"] += ["num_tokens", "old_mask", "reward_mask"]


@pytest.mark.parametrize("argument", ARGUMENT_NAMES)
def test_a_parameter_s_name_tells_which_argument_it_is(argument):
    for name in ARGUMENT_NAMES[argument]:
        assert argument_of(name) == argument, name
        assert argument_of(name.upper()) == argument, name


def no_scalar(logp, logmu, reward, mask):
    return logp[None]


def a_number(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask).item()


def detached(logp, logmu, reward, mask):
    return paper(logp.detach(), logmu, reward, mask)


def five_arguments(logp, logmu, reward, mask, settings):
    return paper(logp, logmu, reward, mask)


@pytest.mark.parametrize("loss", [no_scalar, a_number, detached, five_arguments])
def test_a_loss_that_cannot_be_checked_is_refused_in_a_line(loss):
    with pytest.raises(InputError) as refused:
        identify(loss)
    assert "\n" not in str(refused.value)


def test_a_loss_without_a_gradient_is_not_called_in_other_forms():
    shapes = set()

    def recorded(logp, logmu, reward, mask):
        shapes.add((logp.shape, mask.shape, mask.dtype))
        return paper(logp.detach(), logmu, reward, mask)

    with pytest.raises(InputError):
        identify(recorded)
    assert len({(logp, mask) for logp, mask, _ in shapes}) == 1
    assert {dtype for *_, dtype in shapes} <= {torch.float64, torch.float32, torch.bfloat16}


def test_a_loss_may_change_its_arguments_in_place():
    def in_place(logp, logmu, reward, mask):
        logp.mul_(2)
        reward.zero_()
        return logp.sum()

    ones = torch.ones(1, 2)
    inputs = LossInputs(-ones, -ones, ones[0, :1], ones)
    assert neg_grad(in_place, inputs).tolist() == [[-2, -2]]
    assert inputs.token_logp.tolist() == [[-1, -1]]
    assert inputs.reward.tolist() == [1]
