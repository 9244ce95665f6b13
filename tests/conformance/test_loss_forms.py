"""A loss in another form is called in it: names and order of arguments, layouts, masks, outputs."""

import pytest
import torch
from loss_builders import method_loss, tapered, total

from topr_conformance import InputError, LossInputs, adapted, compare, identify, neg_grad, variants
from topr_conformance.arguments import ARGUMENTS, possible_orders
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


def keyword_only(*, mask, advantages, behavior_logprobs, target_logprobs, config=None):
    return paper(target_logprobs, behavior_logprobs, advantages, mask)


def previous_and_current(prev_logprobs, curr_logprobs, advantages, mask):
    return paper(curr_logprobs, prev_logprobs, advantages, mask)


def generation_and_next_token(generation_logprobs, next_token_logprobs, advantages, token_mask):
    return paper(next_token_logprobs, generation_logprobs, advantages, token_mask)


def with_a_mask_that_may_be_missing(log_probs, old_log_probs, advantages, action_mask=None):
    return paper(log_probs, old_log_probs, advantages, action_mask)


def of_an_object(inputs, config=None):
    columns = (inputs.trainer_logprobs, inputs.inference_logprobs)
    return paper(*columns, inputs.advantages, inputs.loss_mask)


def with_labels(logp, logmu, reward, labels):
    return paper(logp, logmu, reward, labels != -100)


def without_names(a, b, c, d):
    return paper(a, b, c, d)


def without_names_logmu_first(a, b, c, d):
    return paper(b, a, c, d)


def without_names_mask_second(a, b, c, d):
    return paper(c, a, d, b)


def any_arguments(*arguments):
    return paper(*arguments)


# ---- other outputs -------------------------------------------------------------------------------
def returning_a_dictionary(logp, logmu, reward, mask):
    return {"loss": paper(logp, logmu, reward, mask)}


def returning_a_policy_loss(logp, logmu, reward, mask):
    return {"policy_loss": paper(logp, logmu, reward, mask), "clipped": 0.5, "kl": torch.ones(())}


def returning_metrics_first(logp, logmu, reward, mask):
    return {"kl": 0.0}, torch.ones(()), paper(logp, logmu, reward, mask)


def returning_one_value(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask)[None]


def returning_a_list(logp, logmu, reward, mask):
    return [paper(logp, logmu, reward, mask), "metrics"]


def returning_values_of_tokens(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, tapered(logp, logmu, mask), 1.0).detach()
    return -(weight * reward)[:, None] * logp


def returning_values_of_completions(logp, logmu, reward, mask):
    return total(returning_values_of_tokens(logp, logmu, reward, mask), mask) / mask.sum(1)


LOGMU_FIRST = "order logmu, logp, reward, mask"
FORMS = [  # (the verdict, the form in which the loss is called, the loss)
    ("paper", f"{LOGMU_FIRST} + advantages + boolean mask + output 0", as_in_verl),
    ("paper", LOGMU_FIRST, with_logmu_first),
    ("paper", "order mask, reward, logmu, logp", with_behavior_and_returns),
    ("paper", "order reward, logmu, logp, mask", with_sampling_and_scores),
    ("paper", LOGMU_FIRST, with_mu_and_pi),
    ("paper", "order reward, logmu, logp, mask + sequences", of_completions),
    ("another function of the ratio", "sequences", sigmoid_of_completions),
    ("paper", "packed", packed),
    ("paper", "cumulative lengths + packed", packed_with_cumulative_lengths),
    ("per-token", "advantages", per_token_with_advantages),
    ("paper", "time first", time_first),
    ("paper", "boolean mask", with_boolean_mask),
    ("paper", "integer mask", with_integer_mask),
    ("paper", "one batch", of_one_dictionary),
    ("paper", "one batch", of_one_dictionary_by_get),
    ("paper", LOGMU_FIRST, Module()),
    ("paper", "order mask, reward, logmu, logp", keyword_only),
    ("paper", LOGMU_FIRST, previous_and_current),
    ("paper", LOGMU_FIRST, generation_and_next_token),
    ("paper", "none", with_a_mask_that_may_be_missing),
    ("paper", "one batch", of_an_object),
    ("paper", "labels", with_labels),
    ("paper", "none", without_names),
    ("paper", LOGMU_FIRST, without_names_logmu_first),
    ("paper", "order logmu, mask, logp, reward", without_names_mask_second),
    ("paper", "none", any_arguments),
    ("paper", "none", method_loss),
    ("paper", "output 'policy_loss'", returning_a_policy_loss),
    ("paper", "output 2", returning_metrics_first),
    ("paper", "one value", returning_one_value),
    ("paper", "output 'loss'", returning_a_dictionary),
    ("paper", "output 0", returning_a_list),
    ("paper", "mean over completions", returning_values_of_completions),
    ("paper", "tokens", returning_values_of_tokens),
]


@pytest.mark.parametrize(("verdict", "form", "loss"), FORMS)
def test_a_loss_is_called_in_its_form(verdict, form, loss):
    report = identify(loss)
    assert (report.variant, report.adapter) == (verdict, form)
    assert (compare(adapted(loss, form), 50) is None) == (verdict == "paper")


TAKEN_FOR = {  # the parameters of a loss -> which of them are logp, logmu, reward and mask
    "pi mu reward mask": "pi mu reward mask",
    "mu_logprobs pi_logprobs adv mask": "pi_logprobs mu_logprobs adv mask",
    "log_prob old_log_prob advantages response_mask": "",
    "policy_lp behavior_logp returns num_tokens": "",
    "scores sampling_logprobs new_logprobs loss_mask": (
        "new_logprobs sampling_logprobs scores loss_mask"
    ),
    "rollout_log_probs logprobs rewards old_mask": "logprobs rollout_log_probs rewards old_mask",
    "prev_logprobs curr_logprobs adv reward_mask": "curr_logprobs prev_logprobs adv reward_mask",
    "reference_logps logps adv n_tok": "logps reference_logps adv n_tok",
    "logprobs new_logprobs adv lengths": "new_logprobs logprobs adv lengths",
    "target_logprobs behavior_logprobs adv cu_seqlens": "",
    "token_logp other reward mask": "",
    "LOGP LOGMU REWARD MASK": "",
}
GUESSES = [
    "a b reward mask",
    "x_logprobs y_logprobs reward mask",
    "target_logprobs logprobs reward mask",
    "first_logp second_logp reward mask",
    "old_logp old_lp reward mask",
]


@pytest.mark.parametrize("names", TAKEN_FOR)
def test_the_names_of_the_parameters_tell_their_order(names):
    [[order]] = possible_orders(names.split())
    expected = (TAKEN_FOR[names] or names).split()
    name_of = dict(zip(order, names.split(), strict=True))
    assert [name_of[argument] for argument in ARGUMENTS] == expected


@pytest.mark.parametrize("names", GUESSES)
def test_names_that_do_not_tell_leave_two_orders(names):
    [orders] = possible_orders(names.split())
    assert orders == [ARGUMENTS, ("logmu", "logp", "reward", "mask")]


def test_what_was_taken_for_what_is_in_the_report():
    assert identify(previous_and_current).arguments.startswith(
        "logp = curr_logprobs, logmu = prev_logprobs, reward = advantages, mask = mask"
    )
    assert identify(without_names_logmu_first).arguments.startswith("logp = b, logmu = a")
    assert identify(any_arguments).arguments.startswith("logp = argument 1, logmu = argument 2")
    batch_names = "logp = trainer_logprobs, logmu = inference_logprobs, reward = advantages"
    assert identify(of_an_object).arguments.startswith(batch_names)


# ---- what cannot be checked ----------------------------------------------------------------------
def no_scalar(logp, logmu, reward, mask):
    return logp[None]


def a_number(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask).item()


def detached(logp, logmu, reward, mask):
    return paper(logp.detach(), logmu, reward, mask)


def detached_without_names(a, b, c, d):
    return paper(a.detach(), b, c, d)


def names_that_say_the_opposite(old_logp, new_logp, reward, mask):
    return paper(old_logp, new_logp, reward, mask)


def five_arguments(logp, logmu, reward, mask, settings):
    return paper(logp, logmu, reward, mask)


def three_arguments(logp, reward, mask):
    return variants.naive_reinforce(logp, logp, reward, mask)


def of_logits(logits, labels, mask, weights, log_probs):
    return logits.sum()


def of_a_log_ratio(ppo_kl, advantages, eps_clip, eps_clip_high):
    return (ppo_kl * advantages).sum()


def two_of_one_kind(batch):
    return paper(batch.x_logprobs, batch.y_logprobs, batch.advantages, batch.mask)


def two_losses(logp, logmu, reward, mask):
    return {"policy_loss": paper(logp, logmu, reward, mask), "kl_loss": logp.mean()}


def needs_its_configuration(log_prob, old_log_prob, advantages, response_mask, config=None):
    if config is None:
        raise ValueError
    return paper(log_prob, old_log_prob, advantages, response_mask)


REFUSED = {  # the loss -> what the message names
    no_scalar: "(1, 177, 6)",
    a_number: "float",
    detached: "logp = logp",
    detached_without_names: "logp",
    names_that_say_the_opposite: "logp = new_logp",
    five_arguments: "settings",
    three_arguments: "logmu",
    of_logits: "logits",
    of_a_log_ratio: "ppo_kl",
    two_of_one_kind: "y_logprobs",
    two_losses: "kl_loss",
    needs_its_configuration: "raise ValueError",
    torch.add: "add()",
}


@pytest.mark.parametrize("loss", REFUSED)
def test_a_loss_that_cannot_be_checked_is_refused_in_a_line(loss):
    with pytest.raises(InputError) as refused:
        identify(loss)
    assert REFUSED[loss] in str(refused.value)
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
