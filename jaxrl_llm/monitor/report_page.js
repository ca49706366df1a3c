// The page of report.py: values under the pointer, and the samples of one step at a time.
// Text from the run is only ever set as textContent.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function hoverable(card, chart) {
  const svg = card.querySelector("svg");
  const layer = svg.querySelector(".hover");
  if (!layer || chart.x.length === 0) return;
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const tip = make("div", "tip");
  tip.hidden = true;
  card.append(tip);
  let at = -1;
  const offset = (side) => svg.getBoundingClientRect()[side] - card.getBoundingClientRect()[side];

  function hide() {
    at = -1;
    tip.hidden = true;
    layer.replaceChildren();
  }

  function show(index) {
    at = index;
    const line = document.createElementNS(SVG, "line");
    for (const [name, value] of [["x1", chart.x[index]], ["x2", chart.x[index]], ["y1", 24], ["y2", height - 32]]) line.setAttribute(name, value);
    layer.replaceChildren(line);
    tip.replaceChildren(make("div", "muted", chart.labels[index]));
    for (const series of chart.series) {
      const text = series.text[index];
      if (text === null) continue;
      const row = make("div");
      row.append(make("i", "c" + series.color), series.name + " ", make("b", "", text));
      tip.append(row);
      if (series.y[index] === null) continue;
      const dot = document.createElementNS(SVG, "circle");
      for (const [name, value] of [["class", "c" + series.color], ["cx", chart.x[index]], ["cy", series.y[index]], ["r", 4]]) dot.setAttribute(name, value);
      layer.append(dot);
    }
    tip.hidden = false;
    const scale = svg.clientWidth / width;
    const x = offset("left") + chart.x[index] * scale;
    const flip = x + tip.offsetWidth + 20 > card.clientWidth;
    tip.style.left = Math.max(4, flip ? x - tip.offsetWidth - 12 : x + 12) + "px";
    tip.style.top = offset("top") + 20 * scale + "px";
  }

  function nearest(event) {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    let best = 0;
    for (let i = 1; i < chart.x.length; i++) if (Math.abs(chart.x[i] - x) < Math.abs(chart.x[best] - x)) best = i;
    show(best);
  }

  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.min(chart.x.length - 1, Math.max(0, at < 0 ? chart.x.length - 1 : at + move)));
  });
}

document.querySelectorAll(".chart").forEach((card) => hoverable(card, data.charts[Number(card.dataset.chart)]));

function scoreColor(reward) {
  const [low, high] = data.reward_range;
  if (reward === null || typeof reward !== "number") return "transparent";
  const share = high > low ? (reward - low) / (high - low) : 1;
  return `color-mix(in oklab, var(${share < 0.5 ? "--bad" : "--good"}) ${Math.round(12 + 46 * Math.abs(2 * share - 1))}%, transparent)`;
}

function sampleRow(sample) {
  const row = make("div", "sample");
  const score = make("div", "score", sample.score);
  score.style.background = scoreColor(sample.reward);
  const text = make("div", "text mono", sample.completion || "(empty)");
  text.dir = "auto";
  if (!sample.completion) text.classList.add("muted");
  row.append(score, text, make("div", "facts", sample.facts));
  return row;
}

function browse() {
  const place = document.getElementById("browser");
  if (!place || data.samples.length === 0) return;
  const [slider, back, forward, order, which] = ["slider", "back", "forward", "order", "which"].map((id) => document.getElementById(id));
  slider.max = data.samples.length - 1;
  slider.value = slider.max;

  function render() {
    const index = Number(slider.value);
    const step = data.samples[index];
    which.textContent = "step " + step.step;
    back.disabled = index === 0;
    forward.disabled = index === data.samples.length - 1;
    const value = (sample) => (typeof sample.reward === "number" ? sample.reward : -Infinity);
    place.replaceChildren();
    for (const group of step.groups) {
      const card = make("div", "card group");
      const head = make("div");
      const prompt = make("div", "text mono", group.prompt);
      prompt.dir = "auto";
      head.append(prompt, make("div", "mean", group.note));
      card.append(head);
      const rows = group.samples.slice();
      if (order.value === "best") rows.sort((a, b) => value(b) - value(a));
      if (order.value === "worst") rows.sort((a, b) => value(a) - value(b));
      for (const sample of rows) card.append(sampleRow(sample));
      place.append(card);
    }
    if (step.note) place.append(make("p", "muted", step.note));
  }

  const move = (by) => () => {
    slider.value = Number(slider.value) + by;
    render();
  };
  slider.addEventListener("input", render);
  order.addEventListener("change", render);
  back.addEventListener("click", move(-1));
  forward.addEventListener("click", move(1));
  render();
}

browse();
