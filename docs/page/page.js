"use strict";
// The four parts. Each is a pure function from what its controls stand at to what the page shows:
//   shown   {name: number or text} for the elements with this data-name
//   charts  {id: chart} for the figures with this id (see chart.js)
// The controls of a part are the inputs and selects of its section, by id. DATA has the two runs.

const NAMES = {
  topr: "TOPR",
  reinforce: "REINFORCE",
  sft: "SFT",
  tis: "TIS",
  off_policy: "plain IS",
  ppo: "PPO",
  positive: "positive",
  negative: "negative",
  1: "1 ✓", // arms, right or wrong
  2: "2 ✓",
  3: "3 ✗",
  4: "4 ✗",
};
const METHODS = ["topr", "reinforce", "sft", "tis", "off_policy", "ppo"];
const REWARDS = { positive: 1, negative: -1 };
const at = (id) => document.getElementById(id);

// ---- 1. the collapse ---------------------------------------------------------------------------

function collapse({ evaluation, question }) {
  const seen = DATA.seen[evaluation];
  const { asked, ...written } = DATA.questions[question];
  const shown = { seen, asked, number: question + 1 };
  const lines = [];
  for (const [method, completions] of Object.entries(written)) {
    const [completion, grade] = completions[evaluation];
    const y = DATA[method].right.slice(0, evaluation + 1).map((count) => (100 * count) / 768);
    const { half_width } = DATA[method];
    const now = y[evaluation];
    lines.push({ label: NAMES[method], style: method, x: DATA.seen, y, half_width, now });
    shown[method] = now;
    shown[`completion_${method}`] = completion;
    shown[`grade_${method}`] = `${grade === "right" ? "✓" : "✗"} ${grade}`;
  }
  const x = { label: "solutions trained on", low: 0, high: DATA.seen.at(-1) };
  const y = { label: "right answers (%)", low: 0, high: 100, ticks: [0, 50, 100] };
  return { shown, charts: { accuracy: { x, y, mark: seen, lines } } };
}

// ---- 2. the loss -------------------------------------------------------------------------------

const RATIO = {
  label: "ratio, log scale",
  low: 1e-5,
  high: Math.exp(2),
  is_log: true,
  ticks: [1e-4, 0.01, 1],
};
const WEIGHT = { low: 0, high: 2.2, ticks: [0, 1, 2] };
const LOG_RATIOS = range(301).map((i) => 2 - (13.5 * i) / 300).reverse();

// The chart of functions of the log-ratio: {style: function}.
function over_ratio(y, log_ratio, functions) {
  const x = LOG_RATIOS.map(Math.exp);
  const lines = Object.entries(functions).map(([style, value_at]) => ({
    label: NAMES[style],
    style,
    x,
    y: LOG_RATIOS.map(value_at),
    now: value_at(log_ratio),
  }));
  return { x: RATIO, y, mark: Math.exp(log_ratio), lines };
}

function weight_of(method, log_ratio, reward) {
  if (method === "ppo") return ppo_weight(log_ratio, reward);
  return importance_weight(log_ratio, ...bounds_for(TABLE_1[method], reward));
}

function loss({ log_ratio }) {
  const shown = { log_ratio, ratio: Math.exp(log_ratio) };
  const charts = {};
  for (const [sign, reward] of Object.entries(REWARDS)) {
    const functions = {};
    for (const method of METHODS) {
      functions[method] = (x) => weight_of(method, x, reward);
      shown[`weight_${sign}_${method}`] = functions[method](log_ratio);
    }
    const y = { ...WEIGHT, label: `weight of a ${sign}` };
    charts[`loss_${sign}`] = over_ratio(y, log_ratio, functions);
  }
  return { shown, charts };
}

// ---- 3. the bounds -----------------------------------------------------------------------------

const TAPER = { label: "taper ρ", low: -10.5, high: 3, ticks: [-10, -5, 0] };

function facts(limits) {
  const [a_pos, b_pos, a_neg, b_neg] = limits;
  const has_these = (name) => TABLE_1[name].every((bound, i) => bound === limits[i]);
  const method = Object.keys(TABLE_1).find(has_these);
  const fading = "A positive loses its weight as it becomes improbable.";
  const without_floor = b_pos > 0 ? fading : "Positives are not used.";
  return [
    `These are the bounds of ${method ? NAMES[method] : "no method of Table 1"}.`,
    a_neg > 0 ? "The objective has no upper bound." : "The objective is bounded above.",
    b_neg > 0 ? "Negatives are used." : "Negatives are not used.",
    a_pos > 0 ? `A positive never has a weight below ${readable(a_pos)}.` : without_floor,
  ].join(" ");
}

// The lower one of two sliders is the lower bound. The right end of b's sliders is infinity.
function bounds_at(...positions) {
  const bounds = positions.map((position) => (position > 2.01 ? Infinity : position));
  return [Math.min(...bounds), Math.max(...bounds)];
}

function bounds({ bounds_log_ratio: log_ratio, a_pos, b_pos, a_neg, b_neg }) {
  const limits = [...bounds_at(a_pos, b_pos), ...bounds_at(a_neg, b_neg)];
  const shown = { ratio: Math.exp(log_ratio), facts: facts(limits) };
  for (const [i, name] of ["a_pos", "b_pos", "a_neg", "b_neg"].entries()) shown[name] = limits[i];
  const [tapers, weights_of] = [{}, {}];
  for (const [sign, reward] of Object.entries(REWARDS)) {
    tapers[sign] = (x) => taper_of_log(x, ...bounds_for(limits, reward));
    weights_of[sign] = (x) => importance_weight(x, ...bounds_for(limits, reward));
    shown[`rho_${sign}`] = tapers[sign](log_ratio);
    shown[`weight_${sign}`] = weights_of[sign](log_ratio);
    shown[`objective_${sign}`] = topr_objective(log_ratio, reward, limits);
  }
  const slope = { ...WEIGHT, label: "weight: the slope of ρ" };
  const charts = {
    bounds_taper: over_ratio(TAPER, log_ratio, tapers),
    bounds_weight: over_ratio(slope, log_ratio, weights_of),
  };
  return { shown, charts };
}

// ---- 4. the bandit -----------------------------------------------------------------------------

const BANDIT = { mu: [0.1, 0.3, 0.4, 0.2], reward: [1, 1, -1, -1] };
const ARMS = [1, 2, 3, 4];
const BOUND = Math.max(0, ...BANDIT.reward); // Proposition 3.2
const LEARNING_RATE = 1;

function bandit({ other, start, steps }) {
  const first = BANDIT.mu.map((mu, arm) => Math.log(mu) + (arm === 0 ? start : 0));
  const x = range(steps + 1);
  const axis = { label: "steps", low: 0, high: Math.max(steps, 10) };
  const line_of = (label, style, y) => ({ label, style, x, y, now: y[steps] });
  const over_steps = (y, lines) => ({ x: axis, y, mark: steps, lines });

  const shown = { start, steps, other: NAMES[other], bound: BOUND };
  const charts = {};
  const objectives = [line_of("bound", "bound", x.map(() => BOUND))];
  for (const [panel, method] of Object.entries({ other, topr: "topr" })) {
    const limits = TABLE_1[method];
    const path_of_z = ascend(first, BANDIT, limits, LEARNING_RATE, steps);
    const path_of_pi = path_of_z.map(softmax);
    const of_arms = (points) =>
      ARMS.map((arm, i) => line_of(NAMES[arm], `arm-${arm}`, points.map((point) => point[i])));

    const path_of_j = path_of_z.map((z) => objective(z, BANDIT, limits));
    objectives.push(line_of(NAMES[method], method, path_of_j));
    const logits = path_of_z.flat();
    const z_axis = { label: "logit z", low: Math.min(...logits), high: Math.max(...logits) };
    const pi_axis = { label: "π, log scale", low: 1e-7, high: 1, is_log: true };
    charts[`pi_${panel}`] = over_steps(pi_axis, of_arms(path_of_pi));
    charts[`z_${panel}`] = over_steps(z_axis, of_arms(path_of_z));

    shown[`objective_${panel}`] = path_of_j[steps];
    const now = path_of_z[steps];
    const columns = {
      pi: path_of_pi[steps],
      weight: weights(now, BANDIT, limits),
      push: gradient(now, BANDIT, limits),
    };
    for (const [name, values] of Object.entries(columns)) {
      for (const [i, arm] of ARMS.entries()) shown[`${name}_${panel}_${arm}`] = values[i];
    }
  }
  const low = Math.min(-0.5, ...objectives.flatMap(({ y }) => y));
  const j_axis = { label: "objective J", low, high: 2 * BOUND, ticks: [0, BOUND, 2 * BOUND] };
  charts.objectives = over_steps(j_axis, objectives);
  return { shown, charts };
}

// ---- the page ----------------------------------------------------------------------------------

// Tables: a row for each of data-rows, with a cell for each of data-columns.
for (const body of document.querySelectorAll("[data-rows]")) {
  const columns = body.dataset.columns.split(" ");
  for (const row of body.dataset.rows.split(" ")) {
    const cells = columns.map((column) => `<td data-name="${column}_${row}"></td>`);
    body.innerHTML += `<tr><th scope="row">${NAMES[row]}</th>${cells.join("")}</tr>`;
  }
}

// Numbers for readers; data-value keeps all digits for the test.
function write(place, value) {
  place.dataset.value = value;
  place.textContent = typeof value === "number" ? readable(value) : value;
}

// Shows a part now and after every input. Its answers appear once a control was moved.
function show(part) {
  const section = at(part.name);
  const controls = [...section.querySelectorAll("input, select")];
  function draw() {
    const settings = controls.map((one) => [one.id, one.valueAsNumber ?? one.value]);
    const { shown, charts } = part(Object.fromEntries(settings));
    for (const place of section.querySelectorAll("[data-name]")) {
      write(place, shown[place.dataset.name]);
    }
    for (const [id, chart] of Object.entries(charts)) draw_chart(at(id), chart);
    for (const slider of section.querySelectorAll("input")) {
      slider.ariaValueText = slider.labels[0].querySelector("b").textContent;
    }
  }
  section.addEventListener("input", () => {
    section.classList.add("moved");
    draw();
  });
  for (const button of section.querySelectorAll("[data-set]")) {
    button.onclick = () => {
      for (const [id, value] of new URLSearchParams(button.dataset.set)) at(id).value = value;
      section.dispatchEvent(new Event("input"));
    };
  }
  addEventListener("resize", draw);
  draw();
}

[collapse, loss, bounds, bandit].forEach(show);
