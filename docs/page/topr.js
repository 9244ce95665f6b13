"use strict";
// The arithmetic of the page: functions of topr.py and toy_bandit.py for plain numbers and arrays, under their names.
// tests/docs/test_page.py compares what the page shows with the Python of that name, in a browser.

// a+ b+ a- b- (Table 1)
const PRESETS = {
  topr: [1, 1, 0, 1],
  tis: [0, 1, 0, 1],
  sft: [1, 1, 0, 0],
  reinforce: [1, 1, 1, 1],
  off_policy: [0, Infinity, 0, Infinity],
};

// ---- topr.py -------------------------------------------------------------------------------------------------------

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
const mean = (numbers) => sum(numbers) / numbers.length;

const of_sign = (limits, reward) => (reward >= 0 ? limits.slice(0, 2) : limits.slice(2));

// [exp(log_ratio)]_a^b (Equation 7)
function importance_weight(log_ratio, a, b) {
  return clamp(Math.exp(clamp(log_ratio, Math.log(a), Math.log(b))), a, b);
}

// rho(exp(log_ratio), a, b) (Section 3.1)
function taper_of_log(log_ratio, a, b) {
  const clipped = clamp(log_ratio, Math.log(a), Math.log(b));
  return Math.exp(clipped) * (1 + (Number.isFinite(clipped) ? log_ratio - clipped : 0));
}

// the integrand of Equation 11
function topr_objective(log_ratio, reward, limits) {
  return taper_of_log(log_ratio, ...of_sign(limits, reward)) * reward;
}

const effective_proportion = (p, c) => (p * (1 - c)) / (1 + (1 - 2 * p) * c); // Equation 12

// ---- toprlib/methods.py, figures/fig9.py, conformance/topr_conformance/combinations.py --------------------------------

// of the gradient of ppo_loss: 0 where the clip acts (Equation 6)
function ppo_weight(log_ratio, reward, eps = 0.2) {
  const ratio = Math.exp(log_ratio);
  return (reward >= 0 ? ratio <= 1 + eps : ratio >= 1 - eps) ? ratio : 0;
}

// What a question weighs on average over its samples (Figure 9); correct: its share of correct samples.
const weight_by_difficulty = (correct, c) => correct * (1 - c) + (1 - correct) * (1 + c);

// The weight of a negative from the log-ratios of its tokens; of single tokens, their mean.
const VARIANTS = {
  topr: (token_log_ratio) => importance_weight(sum(token_log_ratio), 0, 1),
  "per-token": (token_log_ratio) => mean(token_log_ratio.map((x) => importance_weight(x, 0, 1))),
  "geometric mean": (token_log_ratio) => importance_weight(mean(token_log_ratio), 0, 1),
  "clip 0.8..1.2": (token_log_ratio) => importance_weight(sum(token_log_ratio), 0.8, 1.2),
};

// ---- toy_bandit.py: z (K) logits; bandit = {mu, reward}, (K) each -------------------------------------------------

function log_softmax(z) {
  const largest = Math.max(...z);
  const total = largest + Math.log(sum(z.map((x) => Math.exp(x - largest))));
  return z.map((x) => x - total);
}

const softmax = (z) => log_softmax(z).map(Math.exp);
const log_ratios = (z, bandit) => log_softmax(z).map((logp, i) => logp - Math.log(bandit.mu[i]));

// J_topr (Equation 11)
function objective(z, bandit, limits) {
  return sum(log_ratios(z, bandit).map((x, i) => bandit.mu[i] * topr_objective(x, bandit.reward[i], limits)));
}

function weights(z, bandit, limits) {
  return log_ratios(z, bandit).map((x, i) => importance_weight(x, ...of_sign(limits, bandit.reward[i])));
}

function through_softmax(z, coefficient) {
  const total = sum(coefficient);
  return softmax(z).map((pi, i) => coefficient[i] - pi * total);
}

// Appendix B.1
function gradient(z, bandit, limits) {
  return through_softmax(
    z,
    weights(z, bandit, limits).map((weight, i) => bandit.mu[i] * weight * bandit.reward[i]),
  );
}

const ascended = (z, bandit, limits, lr) => gradient(z, bandit, limits).map((push, i) => z[i] + lr * push);
const upper_bound = (reward) => Math.max(0, ...reward); // Proposition 3.2
