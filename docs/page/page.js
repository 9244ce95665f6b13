"use strict";
// The seven parts. Each reads its controls, computes with topr.js, and shows numbers and charts. DATA has the results.
// A part asks before it shows: a curve is drawn as far as a control was moved, and an answer appears after that.

const NAMES = { topr: "TOPR", reinforce: "REINFORCE", sft: "SFT", tis: "TIS", off_policy: "plain IS", ppo: "PPO" };
const SIGNS = [["pos", "positive", 1], ["neg", "negative", -1]];
const at = (id) => document.getElementById(id);
const number_of = (input) => Number(input.value);
const entries = (names, value_of) => Object.fromEntries(names.map((name) => [name, value_of(name)]));

// ---- what all parts use --------------------------------------------------------------------------------------------

const FORMS = {
  number: readable,
  signed: (x) => (x > 0 ? "+" : "") + plain(x),
  whole: (x) => `${(100 * x).toFixed(0)}\u00a0%`,
  percent: (x) => `${(100 * x).toFixed(1)}\u00a0%`,
  count: (x) => x.toLocaleString("en"),
};

// A number into an element; data-value keeps all digits for the tests.
function show(place, name, value, form) {
  Object.assign(place.dataset, { name, value });
  place.textContent = FORMS[form ?? place.dataset.as ?? "number"](value);
}

// Numbers into the elements of a part that have their names.
function put(part, values) {
  for (const [name, value] of Object.entries(values)) {
    for (const place of at(part).querySelectorAll(`[data-name="${name}"]`)) show(place, name, value);
  }
}

// What an input stands at, beside it and for a screen reader.
function show_value(input, value, form) {
  const place = at(`${input.id}-value`);
  show(place, input.id, value, form);
  input.setAttribute("aria-valuetext", place.textContent);
}

const row = (head, names) =>
  `<tr><th scope="row">${head}</th>${names.map((name) => `<td data-name="${name}"></td>`).join("")}</tr>`;
const option = (value, name) => `<option value="${value}">${escaped(name)}</option>`;

// The part is drawn now, and once a frame after inputs in it or when its width changes. Returns what asks for that.
// Its answers appear once it was moved. At its end is a link that restores what its controls stand at.
const redraws = [];
function on_input(part, draw, is_moved = () => true) {
  const title = at(part).querySelector("h2 span").firstChild.textContent.trim();
  at(part).insertAdjacentHTML("beforeend", `<p class="hint"><a>Link to these settings of ${title}</a></p>`);
  const link = at(part).querySelector(".hint:last-child a");
  let is_due = false;
  function now() {
    is_due = false;
    draw();
    link.href = `#${part}?${new URLSearchParams(controls_of(part).map((one) => [one.id, setting_of(one)]))}`;
  }
  function soon() {
    if (is_moved()) at(part).classList.remove("asks");
    if (is_due) return;
    is_due = true;
    requestAnimationFrame(now);
  }
  at(part).classList.add("asks");
  at(part).addEventListener("input", soon);
  redraws.push(draw);
  now();
  return soon;
}

const controls_of = (part) => [...at(part).querySelectorAll("input, select")];
const setting_of = (control) => (control.type === "checkbox" ? String(Number(control.checked)) : control.value);

// Sets the controls of a part as its link says, and goes there. What a control cannot be set to leaves it as it is.
function restore() {
  const [part, settings] = location.hash.slice(1).split("?");
  if (!settings || !at(part)) return;
  for (const [id, value] of new URLSearchParams(settings)) {
    const control = controls_of(part).find((one) => one.id === id);
    if (!control) continue;
    const was = setting_of(control);
    if (control.type === "checkbox") control.checked = value === "1";
    else control.value = value;
    if (setting_of(control) === "") control.value = was;
    if (setting_of(control) !== was) control.dispatchEvent(new Event("input", { bubbles: true }));
  }
  at(part).scrollIntoView({ behavior: "instant" });
}

// On paper nothing can be moved: begin shows what moving would, end takes it back.
function on_paper(begin, end) {
  addEventListener("beforeprint", begin);
  addEventListener("afterprint", end);
}

// The range that a value has been moved over so far, at each value; on paper all of it. It begins with an eighth.
function moved_over(whole) {
  const margin = (whole[1] - whole[0]) / 16;
  let [range_moved, is_on_paper] = [null, false];
  on_paper(() => (is_on_paper = true), () => (is_on_paper = false));
  return (value) => {
    range_moved ??= [Math.max(value - margin, whole[0]), Math.min(value + margin, whole[1])];
    range_moved = [Math.min(range_moved[0], value), Math.max(range_moved[1], value)];
    return is_on_paper ? whole : range_moved;
  };
}

// ---- charts along training -----------------------------------------------------------------------------------------

const SEEN = DATA.page.seen; // completions trained on, at each point where the runs were looked at

function over_training(id) {
  const slider = at(id);
  const start = String(Math.round(SEEN.length / 8)); // a short line is there from the beginning
  slider.max = SEEN.length - 1;
  slider.value = start;
  let was = start;
  on_paper(() => {
    was = slider.value;
    if (was === start) slider.value = slider.max;
  }, () => (slider.value = was));
  return slider;
}

// What the charts of a part share: lines end at its slider's point, which is marked, and a pointer moves it.
function at_point(slider, lines) {
  const now = number_of(slider);
  const so_far = (values) => values?.slice(0, now + 1);
  return {
    x: { label: "completions trained on", low: 0, high: SEEN[SEEN.length - 1], format: FORMS.count },
    lines: lines.map((line) => ({ ...line, x: so_far(line.x), y: so_far(line.y), half_width: so_far(line.half_width) })),
    marks: [SEEN[now]],
    dots: lines.map(({ style, y }) => ({ x: SEEN[now], y: y[now], style })),
    drag: slider,
    value_at: (x) => SEEN.filter((seen) => seen <= x + SEEN[1] / 2).length - 1,
  };
}

const of_method = (method, y) => ({ label: NAMES[method], style: method, wide: method === "topr", x: SEEN, y });
const PERCENT = { low: 0, high: 100, ticks: [0, 25, 50, 75, 100] };
const POWERS = { scale: "log", ticks: [1e-6, 1e-4, 1e-2, 1],
  format: (x) => (x < 0.01 ? power_of_ten(Math.round(Math.log10(x))) : plain(x)) };

// ---- 1. the collapse -----------------------------------------------------------------------------------------------

const OUTCOMES = { correct: "✓ right", incorrect: "✗ wrong", invalid: "✗ invalid" };
const LONGEST = 200; // characters of a completion; of a longer one, which repeats itself, 75 are shown: three lines

function cut(completion) {
  if (completion.length <= LONGEST) return completion || "(nothing)";
  return `${completion.slice(0, completion.lastIndexOf(" ", 75))} … and so on`;
}

function collapse() {
  const { curves, questions } = DATA.page;
  const [slider, select] = [over_training("collapse-at"), at("collapse-question")];
  const methods = Object.keys(curves);
  select.innerHTML = questions.map((_, i) => option(i, `test question ${i + 1}`)).join("");
  select.value = questions.findIndex(({ completions: { topr } }) => topr[topr.length - 1][1] === "correct");
  on_input("collapse", () => {
    const now = number_of(slider);
    show_value(slider, SEEN[now], "count");
    put("collapse", { seen: SEEN[now], ...entries(methods, (method) => curves[method].correct[now]) });
    const lines = methods.map((method) => ({
      ...of_method(method, curves[method].correct.map((share) => 100 * share)),
      half_width: curves[method].se.map((se) => 200 * se),
    }));
    const both = at_point(slider, lines);
    chart(at("collapse-curve"), {
      says: "Share of right answers during training with TOPR and with naive REINFORCE",
      y: { label: "right answers to test questions (%)", ...PERCENT },
      ...both,
      x: { ...both.x, label: "solutions trained on" },
    });
    const { question, gold, completions } = questions[select.value];
    at("collapse-asked").textContent = `${question} (Answer: ${gold})`;
    for (const method of methods) {
      const [written, outcome] = completions[method][now];
      at(`collapse-grade-${method}`).textContent = `${OUTCOMES[outcome]}${now ? "" : ", before training"}`;
      at(`collapse-text-${method}`).textContent = cut(written.trim());
    }
  });
}

// ---- 2. the loss ---------------------------------------------------------------------------------------------------

const RATIO = { label: "ratio π(y|x) / μ(y|x), log scale", ...POWERS, low: 1e-6, high: Math.exp(2) };
const WEIGHT = { label: "weight", low: 0, high: 2.2, ticks: [0, 0.5, 1, 1.5, 2] };

function weight_of(method, log_ratio, reward) {
  if (method === "ppo") return ppo_weight(log_ratio, reward);
  return importance_weight(log_ratio, ...of_sign(PRESETS[method], reward));
}

function loss() {
  const methods = Object.keys(NAMES);
  const whole = [Math.log(RATIO.low), Math.log(RATIO.high)];
  const moved = Object.fromEntries(SIGNS.map(([sign]) => [sign, moved_over(whole)]));
  const columns = ["weight_pos", "weight_neg"];
  at("loss-table").innerHTML = methods
    .map((method) => row(NAMES[method], columns.map((column) => `${column}_${method}`)))
    .join("");
  on_input("loss", () => {
    for (const [sign, title, reward] of SIGNS) {
      const slider = at(`loss-${sign}`);
      const log_ratio = number_of(slider);
      const ratio = Math.exp(log_ratio);
      const grid = between(...moved[sign](log_ratio), 317);
      show_value(slider, log_ratio);
      put("loss", { [`ratio_${sign}`]: ratio });
      put("loss", entries(methods.map((method) => `weight_${sign}_${method}`), (name) =>
        weight_of(name.slice(`weight_${sign}_`.length), log_ratio, reward)));
      chart(at(`loss-chart-${sign}`), {
        says: `Weight of a ${title} against its ratio, for six methods`,
        x: RATIO,
        y: { ...WEIGHT, label: `weight of a ${title} (R = ${FORMS.signed(reward)})` },
        lines: methods.map((method) => ({
          ...of_method(method, grid.map((x) => weight_of(method, x, reward))),
          x: grid.map(Math.exp),
          beside: weight_of(method, log_ratio, reward),
        })),
        marks: [ratio],
        dots: methods.map((style) => ({ x: ratio, y: weight_of(style, log_ratio, reward), style })),
        drag: slider,
        value_at: Math.log,
      });
    }
  });
  for (const button of document.querySelectorAll("[data-both]")) {
    button.onclick = () => {
      for (const [sign] of SIGNS) at(`loss-${sign}`).value = Math.log(button.dataset.both);
      at("loss").dispatchEvent(new Event("input"));
    };
  }
}

// ---- 3. the bounds -------------------------------------------------------------------------------------------------

const BOUNDS = ["a_pos", "b_pos", "a_neg", "b_neg"];
const ENDLESS = 2.05; // the last position of b's sliders stands for infinity

function facts(limits) {
  const [a_pos, b_pos, a_neg, b_neg] = limits;
  const method = Object.keys(PRESETS).find((name) => PRESETS[name].every((bound, i) => bound === limits[i]));
  const of_positives = b_pos > 0 ? "A positive loses its weight as it becomes improbable." : "Positives are not used.";
  return [
    method ? `These are the bounds of ${NAMES[method]}.` : "No method of Table 1 has these bounds.",
    b_neg > 0 ? "Negatives are used." : "Negatives are not used.",
    a_neg > 0 ? "<b>The objective has no upper bound.</b>" : "The objective is bounded above.",
    a_pos > 0 ? `A positive never has a weight below ${readable(a_pos)}.` : of_positives,
  ].join(" ");
}

function bounds() {
  const slider = at("bounds-ratio");
  const moved = moved_over([-6, 2]);
  const buttons = [...at("bounds-presets").children];
  const limits_now = () => BOUNDS.map((name) => number_of(at(name))).map((bound) => (bound > 2.01 ? Infinity : bound));
  function set(limits) {
    BOUNDS.forEach((name, i) => (at(name).value = Math.min(limits[i], ENDLESS)));
  }
  at("bounds").addEventListener("input", ({ target: { id, value } }) => {
    if (!BOUNDS.includes(id)) return;
    const [a, b] = [at(id.replace(/^b/, "a")), at(id.replace(/^a/, "b"))];
    if (number_of(a) > number_of(b)) a.value = b.value = Math.min(value, 2); // the other one follows
  });
  set(PRESETS.topr);
  const soon = on_input("bounds", () => {
    const limits = limits_now();
    const log_ratio = number_of(slider);
    const ratio = Math.exp(log_ratio);
    const grid = between(...moved(log_ratio), 161);
    BOUNDS.forEach((name, i) => show_value(at(name), limits[i]));
    show_value(slider, ratio);
    at("bounds-says").innerHTML = facts(limits);
    for (const button of buttons) {
      const is_this = PRESETS[button.dataset.preset].every((bound, i) => bound === limits[i]);
      button.setAttribute("aria-pressed", is_this);
    }
    const curves = { taper: { of: taper_of_log, y: { label: "taper ρ", low: -5, high: 3, ticks: [-4, -2, 0, 2] } },
      weight: { of: importance_weight, y: { ...WEIGHT, label: "weight: the slope of ρ on this axis" } } };
    for (const [name, { of, y }] of Object.entries(curves)) {
      const lines = SIGNS.map(([, label, reward]) => ({
        label,
        style: reward > 0 ? "correct" : "invalid",
        x: grid.map(Math.exp),
        y: grid.map((x) => of(x, ...of_sign(limits, reward))),
      }));
      chart(at(`bounds-${name}`), {
        says: `The ${name} of positives and of negatives against the ratio`,
        height: 180,
        x: { ...RATIO, label: "ratio r, log scale", low: Math.exp(-6), ticks: [0.01, 0.1, 1, 5] },
        y,
        lines,
        marks: [ratio],
        dots: SIGNS.map(([, , reward], i) => ({ x: ratio, y: of(log_ratio, ...of_sign(limits, reward)),
          style: lines[i].style })),
        drag: slider,
        value_at: Math.log,
      });
    }
    for (const [sign, , reward] of SIGNS) {
      put("bounds", {
        [`weight_${sign}`]: importance_weight(log_ratio, ...of_sign(limits, reward)),
        [`rho_${sign}`]: taper_of_log(log_ratio, ...of_sign(limits, reward)),
        [`objective_${sign}`]: topr_objective(log_ratio, reward, limits),
      });
    }
  });
  for (const button of buttons) {
    button.onclick = () => {
      set(PRESETS[button.dataset.preset]);
      soon();
    };
  }
}

// ---- 4. the bandit -------------------------------------------------------------------------------------------------

const CASES = { // start: log(pi / mu) of each arm, before pi is made to sum to 1
  two: { mu: [1, 3, 4, 2], reward: [1, 1, -1, -1], start: [0, 0, 0, 0], methods: ["reinforce", "topr"] },
  forgotten: { mu: [2, 4, 4], reward: [1, -1, -1], start: [-12.43, 0, 0], methods: ["tis", "topr"] },
  wrong: { mu: [1, 1, 1, 1, 1], reward: [1, -1, -1, -1, -1], start: [0, 0, 0, 0, 0], methods: ["reinforce", "topr"] },
};
const ARM_INPUTS = { // what each arm is asked for: lowest, highest and usual value
  reward: { name: "reward", low: -1, high: 1, usual: -1, step: 0.1 },
  mu: { name: "share in μ", low: 0.001, high: 1000, usual: 1, step: "any" },
  start: { name: "start", low: -30, high: 30, usual: 0, step: "any" },
};
const ARM_STYLES = ["p1", "p2", "p3", "p4", "p5", "limit"];
const PANELS = [0, 1]; // two policies side by side
const MOST_KEPT = 240; // points of a line; beyond, every other one is dropped

const arm_name = (i, reward) => `arm ${i + 1} (${FORMS.signed(reward)})`;

// What was typed in for an arm; a value that is missing or no number counts as the usual one.
function arm_value(what, i) {
  const { low, high, usual } = ARM_INPUTS[what];
  const typed = at(`${what}-${i}`)?.value.trim() || usual;
  return clamp(Number.isFinite(Number(typed)) ? Number(typed) : usual, low, high);
}

function write_arms(values, count) { // a row of inputs for each arm; values: {reward, mu, start} by arm
  const input = (i) => ([what, { name, low, high, step }]) =>
    `<td><input type="number" id="${what}-${i}" aria-label="${name} of arm ${i + 1}" value="${values[what][i]}"
      min="${low}" max="${high}" step="${step}"></td>`;
  at("bandit-inputs").innerHTML = range(count)
    .map((i) => `<tr><th scope="row">${i + 1}</th>${Object.entries(ARM_INPUTS).map(input(i)).join("")}</tr>`)
    .join("");
}

// Two policies in training: advance(count) makes steps, and keeps at most MOST_KEPT points of their paths.
function training(bandit, z) {
  return { bandit, step: 0, keep: 1, steps: [0], z: PANELS.map(() => z), paths: PANELS.map(() => [z]) };
}

function advance(run, limits, lr, count) {
  for (let done = 0; done < count; done++) {
    run.z = run.z.map((z, panel) => ascended(z, run.bandit, limits[panel], lr));
    run.step++;
    if (run.step % run.keep) continue;
    run.steps.push(run.step);
    run.paths.forEach((points, panel) => points.push(run.z[panel]));
    if (run.steps.length <= MOST_KEPT) continue;
    run.keep *= 2;
    run.paths = run.paths.map((points) => points.filter((_, i) => run.steps[i] % run.keep === 0));
    run.steps = run.steps.filter((step) => step % run.keep === 0);
  }
}

const steps_axis = (step) => ({ label: "steps", low: 0, high: Math.max(step, 10), format: FORMS.count });

function draw_panel(panel, { bandit, step, steps, z: now, paths }, method) {
  const [z, points, limits] = [now[panel], paths[panel], PRESETS[method]];
  const [pi, weight, push] = [softmax(z), weights(z, bandit, limits), gradient(z, bandit, limits)];
  put("bandit", { [`objective_${panel}`]: objective(z, bandit, limits), [`bound_${panel}`]: upper_bound(bandit.reward) });
  for (const i of range(z.length)) {
    const of_arm = { pi: pi[i], z: z[i], weight: weight[i], push: push[i] };
    put("bandit", Object.fromEntries(Object.entries(of_arm).map(([what, x]) => [`${what}_${i}_${panel}`, x])));
  }
  for (const place of document.querySelectorAll(`[data-method="${panel}"]`)) place.textContent = NAMES[method];
  const shared = { x: steps_axis(step), height: 160 };
  const of_arms = (values, last) => ({
    lines: range(z.length).map((i) => ({
      label: arm_name(i, bandit.reward[i]),
      short: arm_name(i, bandit.reward[i]).replace("arm ", ""),
      style: ARM_STYLES[i],
      apart: true,
      x: steps,
      y: values.map((value) => value[i]),
    })),
    dots: last.map((y, i) => ({ x: step, y, style: ARM_STYLES[i] })),
  });
  chart(at(`bandit-pi-${panel}`), {
    says: `Probabilities of the arms over ${FORMS.count(step)} steps of ${NAMES[method]}`,
    ...shared,
    ...of_arms(points.map(softmax), pi),
    y: { label: "probability π, log scale", ...POWERS, low: 1e-7, high: 1 },
  });
  const logits = points.flat();
  chart(at(`bandit-z-${panel}`), {
    says: `Logits of the arms over ${FORMS.count(step)} steps of ${NAMES[method]}`,
    ...shared,
    ...of_arms(points, z),
    y: { label: "logit z", low: Math.min(-4, ...logits), high: Math.max(2, ...logits) },
  });
}

function draw_objectives({ bandit, step, steps, paths }, methods) { // up to twice the bound, whatever lies above
  const bound = upper_bound(bandit.reward);
  const high = Math.max(2 * bound, 0.5);
  const lines = methods.map((method, panel) => {
    const line = { ...of_method(method, paths[panel].map((z) => objective(z, bandit, PRESETS[method]))), x: steps };
    return line.y[line.y.length - 1] > high ? { ...line, label: `${line.label} ↑` } : line;
  });
  chart(at("bandit-objective"), {
    says: `Objectives over ${FORMS.count(step)} steps of ${methods.map((method) => NAMES[method]).join(" and of ")}, and their bound`,
    x: steps_axis(step),
    y: { label: "objective J", low: Math.min(-0.5, ...lines.flatMap((line) => line.y)), high },
    lines,
    dots: lines.map(({ style, y }) => ({ x: steps[steps.length - 1], y: y[y.length - 1], style })),
    rules: [{ y: bound, label: `bound ${plain(bound)}` }],
    height: 170,
  });
}

function bandit() {
  const [choice, arms, lr, speed] = ["case", "arms", "lr", "speed"].map((name) => at(`bandit-${name}`));
  const [play, says] = [at("bandit-play"), at("bandit-says")];
  const method = (panel) => at(`bandit-method-${panel}`);
  const methods = Object.keys(PRESETS).map((name) => option(name, NAMES[name]));
  PANELS.forEach((panel) => (method(panel).innerHTML = methods.join("")));
  let [run, is_playing] = [null, false];

  function begin() { // the chosen bandit, and the two methods to compare on it
    const chosen = CASES[choice.value];
    arms.value = chosen.mu.length;
    write_arms(chosen, chosen.mu.length);
    PANELS.forEach((panel) => (method(panel).value = chosen.methods[panel]));
  }
  function restart() {
    const of_arms = entries(Object.keys(ARM_INPUTS), (what) => range(number_of(arms)).map((i) => arm_value(what, i)));
    const mu = of_arms.mu.map((share) => share / sum(of_arms.mu));
    run = training({ mu, reward: of_arms.reward }, mu.map((share, i) => Math.log(share) + of_arms.start[i]));
    for (const panel of PANELS) {
      const names = (i) => ["pi", "z", "weight", "push"].map((what) => `${what}_${i}_${panel}`);
      at(`bandit-table-${panel}`).innerHTML = mu.map((_, i) => row(arm_name(i, run.bandit.reward[i]).replace("arm ", ""), names(i))).join("");
    }
  }
  function pause() {
    is_playing = false;
    play.textContent = "Play";
    says.setAttribute("aria-live", "polite");
  }
  function learn(times) {
    advance(run, PANELS.map((panel) => PRESETS[method(panel).value]), 10 ** number_of(lr), times * number_of(speed));
  }
  function frame() {
    if (!is_playing) return;
    learn(0.1); // a frame makes a tenth of the steps of a click
    draw();
    requestAnimationFrame(frame);
  }
  function draw() {
    show_value(lr, 10 ** number_of(lr));
    show_value(arms, number_of(arms), "count");
    put("bandit", { step: run.step });
    for (const panel of PANELS) draw_panel(panel, run, method(panel).value);
    draw_objectives(run, PANELS.map((panel) => method(panel).value));
  }

  at("bandit").addEventListener("input", ({ target }) => { // before the part is drawn
    if (target === speed || target === lr) return;
    if (target === choice) begin();
    if (target === arms) {
      const kept = (what) => range(number_of(arms)).map((i) => arm_value(what, i));
      write_arms(entries(Object.keys(ARM_INPUTS), kept), number_of(arms));
    }
    pause();
    restart();
  });
  begin();
  restart();
  const soon = on_input("bandit", draw, () => run.step > 0);
  play.onclick = () => {
    if (is_playing) return pause();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      learn(10); // what a hundred frames would show, without the motion
      return soon();
    }
    is_playing = true;
    play.textContent = "Pause";
    says.setAttribute("aria-live", "off");
    frame();
    soon();
  };
  at("bandit-step").onclick = () => {
    pause();
    learn(1);
    soon();
  };
  at("bandit-reset").onclick = () => {
    pause();
    restart();
    soon();
  };
  let is_for_paper = false; // where nobody can press Play: the 300 steps that the text asks for
  on_paper(() => {
    is_for_paper = run.step === 0;
    if (is_for_paper) learn(300 / number_of(speed));
  }, () => is_for_paper && restart());
}

// ---- 5. the baseline -----------------------------------------------------------------------------------------------

function baseline() {
  const [of_c, of_p] = [at("baseline-c"), at("baseline-p")];
  const { p_tilde: tried, accuracy } = DATA.fig5;
  const [moved_c, moved_share, shares] = [moved_over([-1, 1]), moved_over([0, 1]), between(0, 1, 11)];
  on_input("baseline", () => {
    const [c, p] = [number_of(of_c), number_of(of_p)];
    const p_tilde = effective_proportion(p, c);
    const baselines = between(...moved_c(c), 81);
    const [from, to] = moved_share(clamp(p_tilde, 0.01, 1));
    const reached = (values) => values.filter((_, i) => tried[i] > from - 1e-9 && tried[i] < to + 1e-9);
    show_value(of_c, c);
    show_value(of_p, p, "percent");
    const [hard, easy] = [weight_by_difficulty(0.1, c), weight_by_difficulty(0.9, c)];
    put("baseline", { reward_right: 1 - c, reward_wrong: -1 - c, p_tilde, hard, easy });
    at("baseline-heavier").textContent =
      c === 0 ? "All questions weigh the same." : `${c > 0 ? "Hard" : "Easy"} questions weigh more than others.`;
    chart(at("baseline-share"), {
      says: "Effective share of positives against the baseline",
      x: { label: "baseline c", low: -1, high: 1, ticks: [-1, -0.5, 0, 0.5, 1] },
      y: { label: "effective share p̃ (%)", ...PERCENT },
      lines: [{ label: "", style: "topr", wide: true, x: baselines,
        y: baselines.map((x) => 100 * effective_proportion(p, x)) }],
      marks: [c],
      dots: [{ x: c, y: 100 * p_tilde, style: "topr" }],
      drag: of_c,
      value_at: (x) => x,
    });
    chart(at("baseline-question"), {
      says: "Weight of a question against its share of right answers",
      x: { label: "right answers to the question (%)", ...PERCENT },
      y: { ...WEIGHT, high: 2 },
      lines: [{ label: "this c", style: "topr", wide: true, x: shares.map((share) => 100 * share),
        y: shares.map((share) => weight_by_difficulty(share, c)) }],
      rules: [{ y: 1, label: "c = 0" }],
    });
    chart(at("baseline-accuracy"), {
      says: "Right answers after training against the effective share of positives, for two data sets",
      x: { label: "p̃ (%), log scale", scale: "log", low: 1, high: 100, ticks: [1, 2, 5, 10, 20, 50, 100] },
      y: { label: "right answers (%)", low: 68, high: 78, ticks: [68, 70, 72, 74, 76, 78] },
      lines: Object.entries(accuracy).map(([label, { mean: y, half_width }], i) => ({
        label: label.replace("% positive", " % positive"),
        style: ["p1", "p3"][i],
        points: true,
        x: reached(tried).map((share) => 100 * share),
        y: reached(y).map((share) => 100 * share),
        half_width: reached(half_width).map((one) => 100 * one),
      })),
      bands: [{ from: 10, to: 20, label: "paper's best" }],
      marks: [clamp(100 * p_tilde, 1, 100)],
    });
  });
}

// ---- 6. tokens -----------------------------------------------------------------------------------------------------

function colour_of(value) { // green above 0, brown below, on a symlog scale that is full at 10 nats
  const depth = Math.min(SCALES.symlog(20 * Math.abs(value)) / SCALES.symlog(200), 1);
  return `color-mix(in srgb, var(${value > 0 ? "--up" : "--down"}) ${Math.round(60 * depth)}%, var(--paper))`;
}

function strip(tokens, log_ratios) {
  const item = (value, i) => {
    const kind = value < -0.05 ? ' class="down"' : "";
    const rounded = with_minus(value.toFixed(2));
    const shown = /[1-9]/.test(rounded) ? (value > 0 ? "+" : "") + rounded : "0";
    const number = `<small>${shown}</small>`;
    return `<li style="background:${colour_of(value)}"${kind}><span>${escaped(tokens[i])}</span> ${number}</li>`;
  };
  return `<ul class="strip" aria-label="Tokens with their log-ratios">${log_ratios.map(item).join("")}</ul>`;
}

function tokens() {
  const { completions } = DATA.page;
  const [slider, kinds] = [over_training("tokens-at"), ["right", "wrong"]];
  const symlog = { low: -1000, high: 10, scale: "symlog", ticks: [-1000, -100, -10, -1, 0, 10] };
  const all = completions.flatMap((completion, i) =>
    Object.entries(completion.log_ratio).map(([method, log_ratio]) => ({
      name: `${kinds[i]}_${method}`,
      title: `The ${kinds[i]} completion under ${NAMES[method]}`,
      limits: of_sign(PRESETS[method], completion.reward),
      tokens: completion.tokens,
      log_ratio,
    })));
  at("tokens-question").textContent = completions[0].question;
  at("tokens-strips").innerHTML = all
    .map(({ name, title }) => `<h3>${title}: log-ratio <span data-name="log_ratio_${name}"></span>,
      weight <span data-name="weight_${name}"></span></h3><div id="strip-${name}"></div>`)
    .join("");
  on_input("tokens", () => {
    const now = number_of(slider);
    show_value(slider, SEEN[now], "count");
    put("tokens", { seen: SEEN[now] });
    completions.forEach(({ log_ratio }, i) => {
      const lines = Object.entries(log_ratio).map(([method, values]) => of_method(method, values.map(sum)));
      chart(at(`tokens-chart-${i}`), {
        says: `Log-ratio of the ${kinds[i]} completion during training`,
        y: { label: `log-ratio of the ${kinds[i]} completion`, ...symlog },
        ...at_point(slider, lines),
      });
    });
    for (const one of all) {
      const total = sum(one.log_ratio[now]);
      const weight = importance_weight(total, ...one.limits);
      put("tokens", { [`log_ratio_${one.name}`]: total, [`weight_${one.name}`]: weight });
      at(`strip-${one.name}`).innerHTML = strip(one.tokens, one.log_ratio[now]);
    }
  });
}

// ---- 7. variants ---------------------------------------------------------------------------------------------------

const VARIANT_ROWS = { // name in conformance/topr_conformance/combinations.py: name on the page, what it computes
  topr: ["paper", "the ratio of the whole completion, at most 1"],
  "per-token": ["per token", "each token's own ratio, at most 1"],
  "per-token + token mean": ["+ token mean", "the same, but all tokens of a batch count equally"],
  "geometric mean": ["geometric mean", "the log-ratio is divided by the length"],
  "clip 0.8..1.2": ["clip 0.8–1.2", "the ratio of the whole completion, but at least 0.8"],
};

function variants() {
  const [slider, select] = [over_training("variants-at"), at("variants-run")];
  const wrong = DATA.page.completions[1];
  const names = Object.keys(VARIANT_ROWS);
  const weight = (name, log_ratios) => VARIANTS[name.replace(" + token mean", "")](log_ratios);
  at("variants-table").innerHTML = names
    .map((name) => {
      const [title, meaning] = VARIANT_ROWS[name];
      const [, at_one_rate, , , at_own_rate] = DATA.variants.find(([of]) => of === `\`${name}\``);
      const accuracies = [at_one_rate, at_own_rate].map((share) => `<td class="answer">${share.replace(" %", "").replace("-", "−")}</td>`).join("");
      return `<tr><th scope="row">${title} <small>${meaning}</small></th><td data-name="${name}"></td>${accuracies}</tr>`;
    })
    .join("");
  on_input("variants", () => {
    const now = number_of(slider);
    const log_ratio = wrong.log_ratio[select.value];
    show_value(slider, SEEN[now], "count");
    put("variants", { seen: SEEN[now], drift: mean(log_ratio[now]) });
    put("variants", entries(names, (name) => weight(name, log_ratio[now])));
    const lines = names.map((name) => ({
      label: VARIANT_ROWS[name][0],
      style: name,
      wide: name === "topr",
      x: SEEN,
      y: log_ratio.map((of_tokens) => weight(name, of_tokens)),
    }));
    chart(at("variants-chart"), {
      says: "Weight of the wrong completion during training, for the paper's loss and its variants",
      y: { label: "weight, log scale", ...POWERS, low: 1e-6, high: 1 },
      ...at_point(slider, lines),
    });
  });
}

// ---- the page ------------------------------------------------------------------------------------------------------

for (const part of [collapse, loss, bounds, bandit, baseline, tokens, variants]) part();
restore();
addEventListener("hashchange", restore);

const redraw = () => redraws.forEach((draw) => draw());
let width_drawn = innerWidth;
addEventListener("resize", () => {
  if (width_drawn !== innerWidth) redraw(); // a telephone's address bar changes the height alone
  width_drawn = innerWidth;
});

// On paper every answer is open, and charts are drawn at the width of a sheet.
on_paper(() => {
  for (const answer of document.querySelectorAll("details")) {
    answer.dataset.was = answer.open;
    answer.open = true;
  }
  document.body.classList.add("on-paper");
  redraw();
}, () => {
  for (const answer of document.querySelectorAll("details")) answer.open = answer.dataset.was === "true";
  document.body.classList.remove("on-paper");
  redraw();
});
