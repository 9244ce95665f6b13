"use strict";
// Line charts as SVG. Every line has a dash pattern and a label, so that nothing rests on colour.

const range = (count) => Array.from({ length: count }, (_, i) => i);

// ---- numbers as text ---------------------------------------------------------------------------

const superscript = (sign) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? "⁻";

// 0.0498, 4,096, −3.5 × 10⁻⁵, ∞: three significant digits, and whole numbers in full
function readable(x) {
  const size = Math.abs(x);
  if ((size > 0 && size < 1e-3) || (size >= 1e6 && size < Infinity)) {
    const [factor, exponent] = x.toExponential(2).split("e").map(Number);
    const power = `10${[...String(exponent)].map(superscript).join("")}`;
    return factor === 1 ? power : `${factor} × ${power}`.replace("-", "−");
  }
  const digits = Number.isInteger(x) ? 21 : 3;
  const format = { maximumSignificantDigits: digits, signDisplay: "negative" }; // no −0
  return x.toLocaleString("en", format).replace("-", "−");
}

// ---- elements of a chart -----------------------------------------------------------------------

const HEIGHT = 180;
const ROW = 16; // pixels of a label
const pen = document.createElement("canvas").getContext("2d");
pen.font = `14px ${getComputedStyle(document.documentElement).getPropertyValue("--sans")}`;
const widest = (texts) => Math.max(...texts.map((text) => pen.measureText(text).width));

function tag(name, attributes, content = "") {
  const list = Object.entries(attributes).map(([key, value]) => ` ${key}="${value}"`);
  return `<${name}${list.join("")}>${content}</${name}>`;
}

const text = (content, x, y, anchor) => tag("text", { x, y, "text-anchor": anchor }, content);
const path = (kind, points) => tag("path", { class: kind, d: `M${points.join("L")}` });

// The function from values to pixels, which are finite also for log(0); axis: {low, high, is_log}.
function scale_of({ low, high, is_log }, from, to) {
  const map = is_log ? Math.log : Number;
  const factor = (to - from) / (map(high) - map(low));
  return (value) => clamp(from + factor * (map(value) - map(low)), -1e4, 1e4);
}

// Moves labels, {y}, apart between top and bottom, in the order of their lines.
function spread(labels, top, bottom) {
  labels.sort((one, other) => one.y - other.y);
  let free = top;
  for (const label of labels) {
    label.y = Math.max(label.y, free);
    free = label.y + ROW;
  }
  let limit = bottom;
  for (const label of labels.toReversed()) {
    label.y = Math.min(label.y, limit);
    limit = label.y - ROW;
  }
}

// Where a line is beyond the chart, its label has an arrow.
function label_of({ label, now }, { low, high }) {
  if (now > high) return `${label} ↑`;
  return now < low ? `${label} ↓` : label;
}

// ---- the chart ---------------------------------------------------------------------------------

// Draws into the element `place`, at its width.
//   x, y    axes {label, low, high, is_log, ticks}; without ticks, the two ends have one
//   mark    the x that a vertical line marks
//   lines   [{label, style, x, y, half_width, now}]: style is a class of style.css, and now is
//           the y at the mark, where the line has a dot and, beside the chart, its label
function draw_chart(place, { x, y, mark, lines }) {
  const ticks_of = ({ ticks, low, high }) => ticks ?? [low, high];
  const names = lines.map((line) => label_of(line, y));
  const width = place.clientWidth;
  const [top, bottom] = [28, HEIGHT - 42];
  const left = Math.max(36, 8 + widest(ticks_of(y).map(readable)));
  const right = Math.max(left + 10, width - widest(names) - 38);
  const to_x = scale_of(x, left, right);
  const to_y = scale_of(y, bottom, top);

  const area = { x: left - 6, y: top - 6, width: right - left + 12, height: bottom - top + 12 };
  const parts = [
    tag("clipPath", { id: `clip-${place.id}` }, tag("rect", area)),
    text(y.label, 0, 14, "start"),
    text(x.label, (left + right) / 2, HEIGHT - 4, "middle"),
    path("mark", [`${to_x(mark)} ${top}`, `${to_x(mark)} ${bottom}`]),
  ];
  for (const tick of ticks_of(y)) {
    parts.push(path("grid", [`${left} ${to_y(tick)}`, `${right} ${to_y(tick)}`]));
    parts.push(text(readable(tick), left - 8, to_y(tick) + 4, "end"));
  }
  for (const tick of ticks_of(x)) {
    parts.push(path("grid", [`${to_x(tick)} ${top}`, `${to_x(tick)} ${bottom}`]));
    parts.push(text(readable(tick), to_x(tick), bottom + 19, "middle"));
  }

  const inside = [];
  for (const line of lines) {
    const points_of = (values) => values.map((value, j) => `${to_x(line.x[j])} ${to_y(value)}`);
    if (line.half_width) {
      const upper = points_of(line.y.map((value, j) => value + line.half_width[j]));
      const lower = points_of(line.y.map((value, j) => value - line.half_width[j]));
      inside.push(path(`interval ${line.style}`, [...upper, ...lower.reverse()]));
    }
    inside.push(path(`line ${line.style}`, points_of(line.y)));
    const dot = { class: `dot ${line.style}`, cx: to_x(mark), cy: to_y(line.now), r: 5 };
    inside.push(tag("circle", dot));
  }
  parts.push(tag("g", { "clip-path": `url(#clip-${place.id})` }, inside.join("")));

  const y_of = ({ now }) => clamp(to_y(now), top, bottom);
  const labels = lines.map((line, i) => ({ name: names[i], style: line.style, y: y_of(line) }));
  spread(labels, top, bottom);
  for (const label of labels) {
    const sample = [`${right + 8} ${label.y}`, `${right + 30} ${label.y}`];
    parts.push(path(`line ${label.style}`, sample));
    parts.push(text(label.name, right + 35, label.y + 5, "start"));
  }
  const says = `${y.label} against ${x.label}: ${names.join(", ")}`;
  const svg = { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": says };
  place.innerHTML = tag("svg", svg, parts.join(""));
}
