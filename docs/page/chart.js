"use strict";
// Line charts as SVG: every line has a dash pattern and a label at its end, so that nothing rests on colour.

// ---- numbers as text -----------------------------------------------------------------------------------------------

const range = (count) => Array.from({ length: count }, (_, i) => i);
const between = (low, high, count) => range(count).map((i) => low + ((high - low) * i) / (count - 1));

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power_of_ten = (exponent) => `10${[...String(exponent)].map((sign) => SUPERSCRIPT[sign]).join("")}`;
const with_minus = (text) => String(text).replace(/^-/, "−");
const grouped = (text) => text.replace(/^-?\d{4,}/, (whole) => Number(whole).toLocaleString("en")); // 460,000
const plain = (x) => with_minus(grouped(String(Number(x.toPrecision(6)))));

// With so many significant digits: 0.0498, 3.50 × 10⁻⁵, −∞; a number that needs fewer has no zeros at its end
function readable(x, digits = 3) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "–" : x > 0 ? "∞" : "−∞";
  const short = Number(x.toPrecision(9));
  if (short === Number(x.toPrecision(digits)) && String(short).length <= digits + 3) return plain(short);
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6)) {
    const [factor, exponent] = x.toExponential(digits - 1).split("e");
    return with_minus(`${factor}\u202f×\u202f${power_of_ten(Number(exponent))}`);
  }
  const rounded = Number(x.toPrecision(digits));
  const decimals = rounded === 0 ? 0 : clamp(digits - 1 - Math.floor(Math.log10(Math.abs(rounded))), 0, digits + 2);
  return with_minus(grouped(rounded.toFixed(decimals)));
}

// ---- elements of a chart -------------------------------------------------------------------------------------------

const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

function tag(name, attributes, content = "") {
  const list = Object.entries(attributes).map(([key, value]) => ` ${key}="${escaped(value)}"`);
  return `<${name}${list.join("")}>${content}</${name}>`;
}

const text = (content, x, y, anchor = "start") => tag("text", { x, y, "text-anchor": anchor }, escaped(content));
const path = (kind, d, look = {}) => tag("path", { class: kind, d, ...look });
const colour = (style) => `var(--line-${style.replace(/\W+/g, "-")})`; // of style.css
const HEIGHT = [180, 210]; // of a chart that does not say: narrow, wide

const SCALES = {
  linear: (x) => x,
  log: (x) => Math.log10(x),
  symlog: (x) => Math.sign(x) * Math.log10(1 + Math.abs(x)),
};

// The function from values to pixels; axis: {low, high, scale}.
function scale_of(axis, from, to) {
  const map = SCALES[axis.scale ?? "linear"];
  const [low, high] = [map(axis.low), map(axis.high)];
  return (value) => from + ((map(value) - low) / (high - low)) * (to - from);
}

// The axis's ticks, or about five round ones.
function ticks_of({ ticks, low, high }) {
  if (ticks) return ticks;
  const rough = (high - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((size) => size >= rough);
  const first = Math.ceil(low / step - 1e-9);
  return range(Math.floor(high / step + 1e-9) - first + 1).map((i) => (first + i) * step);
}

// Of the numbers along x, {at, tick_text}: all of them, or every second, third ... so that none touches the next.
function apart(numbers) {
  const reach = ({ at, tick_text }, side) => at + side * (width_of(tick_text) / 2 + 3);
  const is_clear = (kept) => kept.every((one, i) => i === 0 || reach(one, -1) > reach(kept[i - 1], 1));
  return range(numbers.length).map((i) => numbers.filter((_, j) => j % (i + 1) === 0)).find(is_clear) ?? [];
}

// Lines that coincide become one, with the labels of all.
function joined(lines) {
  const found = new Map();
  for (const line of lines) {
    const key = line.apart ? line.label : JSON.stringify([line.x, line.y.map((y) => Number(y.toPrecision(9)))]);
    if (found.has(key)) found.get(key).labels.push(line.label);
    else found.set(key, { ...line, labels: [line.label] });
  }
  return [...found.values()];
}

// Moves labels, {wanted, height}, apart between top and bottom, in the order of their lines' ends.
function spread(labels, top, bottom) {
  const gap = labels.some((label) => label.height > ROW) ? 5 : 0; // of a label of two lines it shows where it ends
  labels.sort((one, other) => one.wanted - other.wanted);
  let free = top;
  for (const label of labels) {
    label.y = Math.max(label.wanted - label.height / 2, free);
    free = label.y + label.height + gap;
  }
  let limit = bottom;
  for (const label of [...labels].reverse()) {
    label.y = Math.min(label.y, limit - label.height);
    limit = label.y - gap;
  }
}

const pen = document.createElement("canvas").getContext("2d");
pen.font = `14px ${getComputedStyle(document.documentElement).getPropertyValue("--sans")}`; // as svg text in style.css
const width_of = (label) => pen.measureText(label).width;
const ROW = 16; // pixels of a label

// Markers {cx, cy, style}. Those at the same point share a ring, of which each has a part in its colour.
function rings(markers) {
  const places = new Map();
  for (const marker of markers) {
    const key = `${Math.round(marker.cx)} ${Math.round(marker.cy)}`;
    places.set(key, [...(places.get(key) ?? []), marker]);
  }
  return [...places.values()].flatMap((together) => {
    const [{ cx, cy }] = together;
    const part = (2 * Math.PI * 6) / together.length;
    const arcs = together.map(({ style }, i) => tag("circle", { class: "ring", cx, cy, r: 6,
      style: `stroke:${colour(style)}`, "stroke-dasharray": `${part} 100`, "stroke-dashoffset": -i * part }));
    return [tag("circle", { class: "dot", cx, cy, r: 7 }), ...arcs];
  });
}

// ---- the chart -----------------------------------------------------------------------------------------------------

// Draws into the element `place`, at its width. spec has
//   says    what a screen reader reads
//   x, y    axes {label, low, high, scale, ticks, format}; format: value -> text
//   lines   [{label, short, x, y, style, half_width, wide, apart, points, beside}]; beside: the y of its label, usually its
//           end's; short: the label in a narrow chart
//   marks   x values with a vertical line; dots [{x, y, style}]; rules [{y, label}]; bands [{from, to, label}]
//   drag    the range input that a pointer on the chart moves, to value_at(x)
// A label appears with its line; where a line has only its first dot, that of a line kept apart, if no other dot is there.
// The element keeps its lines' numbers in `place.lines`.
function chart(place, spec) {
  const begun = spec.lines.filter((line) => line.x.length); // a line without points is not drawn
  place.lines = Object.fromEntries(begun.map(({ label, x, y }) => [label, { x, y }]));
  const width = Math.max(place.clientWidth, 140);
  const is_narrow = width < 260;
  const lines = joined(begun.map((line) => ({ ...line, label: (is_narrow && line.short) || line.label })));
  const is_drawn = (line) => line.points || line.x.some((x) => x !== line.x[0]);
  const is_alone = (line) => line.apart && lines.every((one) => one === line || one.y[0] !== line.y[0]);
  const { rules = [], marks = [], dots = [], bands = [] } = spec;
  const names = [...lines.flatMap((line) => line.labels), ...rules.map((rule) => rule.label)].filter(Boolean);
  const height = spec.height ?? HEIGHT[Number(width > 480)];
  const of_y = ticks_of(spec.y).map((tick) => [tick, (spec.y.format ?? plain)(tick)]);
  const left = Math.max(is_narrow ? 0 : 54, 14 + Math.max(...of_y.map(([, tick_text]) => width_of(tick_text))));
  const [top, bottom] = [28, height - 42];
  const sample = is_narrow ? 0 : 20; // pixels of a line beside its label
  const right = Math.max(width - (names.length ? 15 + sample + Math.max(...names.map(width_of)) : 12), left + 20);
  const x = scale_of(spec.x, left, right);
  const y = scale_of(spec.y, bottom, top);
  const clip = { "clip-path": `url(#clip-${place.id})` };

  const parts = [tag("clipPath", { id: `clip-${place.id}` },
    tag("rect", { x: left, y: top - 2, width: right - left, height: bottom - top + 4 }))];
  for (const { from, to, label } of bands) {
    parts.push(tag("rect", { class: "band", x: x(from), y: top, width: x(to) - x(from), height: bottom - top }));
    const words = label.split(" ").reverse(); // one below the other
    parts.push(...words.map((word, i) => text(word, (x(from) + x(to)) / 2, bottom - 6 - ROW * i, "middle")));
  }
  for (const [tick, tick_text] of of_y) {
    parts.push(path("grid", `M${left} ${y(tick)}H${right}`));
    parts.push(text(tick_text, left - 10, y(tick) + 4, "end"));
  }
  const of_x = ticks_of(spec.x).map((tick) => ({ at: x(tick), tick_text: (spec.x.format ?? plain)(tick) }));
  parts.push(...of_x.map(({ at }) => path("grid", `M${at} ${top}V${bottom}`)));
  parts.push(...apart(of_x).map(({ at, tick_text }) => text(tick_text, at, bottom + 19, "middle")));
  parts.push(text(spec.y.label, 0, 14), text(spec.x.label, (left + right) / 2, height - 4, "middle"));
  parts.push(...marks.map((mark) => path("mark", `M${x(mark)} ${top}V${bottom}`)));

  const labels = [];
  for (const rule of rules) {
    parts.push(path("rule", `M${left} ${y(rule.y)}H${right}`));
    labels.push({ names: [rule.label], is_beside: true, wanted: y(rule.y), height: ROW });
  }
  for (const line of lines) {
    const dashes = STYLES[line.style];
    const thick = line.wide ? 4 : 2;
    const stroke = `stroke:${colour(line.style)}`;
    const look = { style: stroke, "stroke-width": thick, "stroke-dasharray": dashes.map((dash) => dash * thick) };
    const to_points = (values) => values.map((value, i) => `${x(line.x[i])} ${clamp(y(value), -1e4, 1e4)}`);
    if (line.half_width) {
      const edge = (sign) => to_points(line.y.map((value, i) => value + sign * line.half_width[i]));
      const around = [...edge(1), ...edge(-1).reverse()];
      parts.push(path("interval", `M${around.join("L")}Z`, { style: `fill:${colour(line.style)}`, ...clip }));
    }
    parts.push(path("line", `M${to_points(line.y).join("L")}`, { ...look, ...clip }));
    if (line.points) {
      const look_of_points = { r: 3.5, style: `fill:${colour(line.style)}` };
      parts.push(...line.x.map((at, i) => tag("circle", { cx: x(at), cy: y(line.y[i]), ...look_of_points })));
    }
    if (line.label && (is_drawn(line) || is_alone(line))) {
      const wanted = clamp(y(line.beside ?? line.y[line.y.length - 1]), top, bottom);
      const is_beside = line.beside === undefined && x(line.x[line.x.length - 1]) > right - 1;
      labels.push({ names: line.labels, look, is_beside, wanted, height: ROW * line.labels.length });
    }
  }
  const inside = dots.map((dot) => ({ cx: x(dot.x), cy: y(dot.y), style: dot.style }));
  parts.push(...rings(inside.filter(({ cy }) => top - 2 <= cy && cy <= bottom + 2)));
  spread(labels, top - 8, bottom + 8);
  for (const { names: shown, look, is_beside, y: above, height: tall, wanted } of labels) {
    if (is_beside) parts.push(path("leader", `M${right} ${wanted}L${right + 8} ${above + tall / 2}`));
    if (look && sample) parts.push(path("line", `M${right + 8} ${above + tall / 2}h18`, look));
    parts.push(...shown.map((name, i) => text(name, right + 11 + (look ? sample : 0), above + 12.5 + ROW * i)));
  }
  const svg = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.says };
  place.innerHTML = tag("svg", svg, parts.join(""));
  if (spec.drag) dragged(place, left, right, width, spec);
}

// A pointer on the chart moves the range input.
function dragged(place, left, right, width, { x, drag, value_at }) {
  const map = SCALES[x.scale ?? "linear"];
  place.classList.add("draggable");
  place.onpointerdown = place.onpointermove = (event) => {
    if (event.type === "pointermove" && event.buttons !== 1) return;
    const frame = place.getBoundingClientRect();
    const share = clamp(((event.clientX - frame.left) * (width / frame.width) - left) / (right - left), 0, 1);
    const value = map(x.low) + share * (map(x.high) - map(x.low));
    drag.value = value_at(x.scale === "log" ? 10 ** value : value);
    drag.dispatchEvent(new Event("input", { bubbles: true }));
  };
}
