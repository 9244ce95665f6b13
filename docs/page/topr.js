"use strict";
// Functions of topr.py and toy_bandit.py under their names, for plain numbers and arrays.
// tests/docs/test_page.py compares what the page shows with the Python of that name, in a browser.

// a+ b+ a- b-
const TABLE_1 = {
  topr: [1, 1, 0, 1],
  tis: [0, 1, 0, 1],
  sft: [1, 1, 0, 0],
  reinforce: [1, 1, 1, 1],
  off_policy: [0, Infinity, 0, Infinity],
};

// ---- topr.py -----------------------------------------------------------------------------------

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const bounds_for = (limits, reward) => (reward >= 0 ? limits.slice(0, 2) : limits.slice(2));

// [exp(log_ratio)]_a^b (Equation 7)
function importance_weight(log_ratio, a, b) {
  return clamp(Math.exp(log_ratio), a, b);
}

// rho(exp(log_ratio), a, b) (Section 3.1)
function taper_of_log(log_ratio, a, b) {
  const weight = importance_weight(log_ratio, a, b);
  return weight > 0 ? weight * (1 + log_ratio - Math.log(weight)) : 0;
}

// the integrand of Equation 11
function topr_objective(log_ratio, reward, limits) {
  return taper_of_log(log_ratio, ...bounds_for(limits, reward)) * reward;
}

// ---- toprlib/methods.py ------------------------------------------------------------------------

// of the gradient of ppo_loss: 0 where the clip acts (Equation 6)
function ppo_weight(log_ratio, reward, eps = 0.2) {
  const ratio = Math.exp(log_ratio);
  const is_used = reward >= 0 ? ratio <= 1 + eps : ratio >= 1 - eps;
  return is_used ? ratio : 0;
}

// ---- toy_bandit.py: z (K) logits; bandit = {mu, reward}, (K) each -------------------------------

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);

function log_softmax(z) {
  const largest = Math.max(...z);
  const log_total = largest + Math.log(sum(z.map((x) => Math.exp(x - largest))));
  return z.map((x) => x - log_total);
}

const softmax = (z) => log_softmax(z).map(Math.exp);
const log_ratios = (z, { mu }) => log_softmax(z).map((logp, i) => logp - Math.log(mu[i]));

// J_topr (Equation 11)
function objective(z, bandit, limits) {
  const { mu, reward } = bandit;
  return sum(log_ratios(z, bandit).map((x, i) => mu[i] * topr_objective(x, reward[i], limits)));
}

function weights(z, bandit, limits) {
  const bounds = bandit.reward.map((reward) => bounds_for(limits, reward));
  return log_ratios(z, bandit).map((x, i) => importance_weight(x, ...bounds[i]));
}

// Appendix B.1
function gradient(z, bandit, limits) {
  const { mu, reward } = bandit;
  const mass = weights(z, bandit, limits).map((weight, i) => mu[i] * weight * reward[i]);
  const delta = sum(mass);
  return softmax(z).map((pi, i) => mass[i] - pi * delta);
}

// z at the start and after every step
function ascend(z, bandit, limits, lr, steps) {
  const path = [z];
  for (let step = 0; step < steps; step++) {
    const push = gradient(path[step], bandit, limits);
    path.push(path[step].map((logit, i) => logit + lr * push[i]));
  }
  return path;
}
