"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("chart");
  const tip = document.getElementById("tip");
  const pen = canvas.getContext("2d");
  const LEFT = 92, RIGHT = 92, TOP = 26, AXIS = 40, GAP = 14, LANE = 26;
  const opCount = data.ops.length;
  const momentCount = opCount + data.events.length;

  // Moment -> tick, and for each moment whether it is an op (an event takes no room on the axis of ops).
  const tickOf = new Array(momentCount + 1);
  const isOp = new Uint8Array(momentCount);
  for (let moment = 0, tick = 0, event = 0; moment < momentCount; moment++) {
    tickOf[moment] = tick;
    if (event < data.events.length && data.events[event] <= tick) event++;
    else { isOp[moment] = 1; tick++; }
  }
  tickOf[momentCount] = opCount;
  const opMoment = [];
  isOp.forEach((op, moment) => { if (op) opMoment.push(moment); });
  opMoment.push(momentCount);

  const total = Math.max(data.planned.times[momentCount], data.plain.times[momentCount]) || 1;
  const topBytes = Math.max(data.limit_bytes, ...[data.plain, data.planned].map((curve) => curve.bytes.reduce((a, b) => Math.max(a, b), 1)));
  let axis = "time", view = [0, total], pointer = null, drag = null, bars = [], colour = {};

  const whole = () => (axis === "time" ? total : opCount);
  const edges = (curve) => (axis === "time" ? curve.times : tickOf);

  /** Largest index whose edge is not after `position`. */
  function find(list, position) {
    let low = 0, high = list.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (list[middle] <= position) low = middle; else high = middle - 1;
    }
    return low;
  }
  /** Ops done at a time of the planned step, with the share of the running one. */
  function tickAt(seconds) {
    const times = data.planned.times, moment = Math.min(find(times, seconds), momentCount - 1);
    const length = times[moment + 1] - times[moment];
    return tickOf[moment] + (isOp[moment] && length > 0 ? Math.min((seconds - times[moment]) / length, 1) : 0);
  }
  function secondsAt(position) {
    const tick = Math.min(Math.floor(position), opCount - 1), moment = opMoment[tick], times = data.planned.times;
    return times[moment] + (position - tick) * (times[moment + 1] - times[moment]);
  }
  /** Place of a time of the planned step on the axis in use. */
  const place = (seconds) => (axis === "time" ? seconds : tickAt(seconds));

  function bytesText(count) {
    let unit = 0, size = count;
    while (size >= 1024 && unit < 4) { size /= 1024; unit++; }
    return size.toFixed(unit === 0 ? 0 : size < 10 ? 2 : size < 100 ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
  }
  function secondsText(seconds) {
    if (seconds >= 1) return seconds.toFixed(3) + " s";
    if (seconds >= 1e-3) return (seconds * 1e3).toFixed(2) + " ms";
    return (seconds * 1e6).toFixed(0) + " \u00b5s";
  }

  // ---- geometry
  const lanes = [
    { name: "copies out", each: "copy out", colour: "out", bars: data.transfers.filter((bar) => bar.direction === "out") },
    { name: "copies in", each: "copy in", colour: "in", bars: data.transfers.filter((bar) => bar.direction === "in") },
    { name: "recomputed", each: "recomputed", colour: "recomputed", bars: data.recomputes },
    { name: "stalls", each: "stall", colour: "stall", bars: data.stalls },
  ];
  const size = () => ({ width: canvas.clientWidth, height: canvas.clientHeight });
  const plotBottom = () => size().height - AXIS - GAP - lanes.length * LANE;
  const xOf = (position) => LEFT + ((position - view[0]) / (view[1] - view[0])) * (size().width - LEFT - RIGHT);
  const positionOf = (x) => view[0] + ((x - LEFT) / (size().width - LEFT - RIGHT)) * (view[1] - view[0]);
  const yTop = topBytes * 1.06;
  const yOf = (count) => plotBottom() - (count / yTop) * (plotBottom() - TOP);

  function byteStep() {
    const wanted = yTop / 7;
    let step = 1;
    while (step < wanted) step *= 2;
    return step;
  }
  function niceStep(span, most) {
    const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  }

  // ---- drawing
  function text(words, x, y, fill, align = "left", weight = "") {
    pen.font = `${weight} 12px system-ui, "Segoe UI", Roboto, Arial, sans-serif`.trim();
    pen.textAlign = align;
    pen.textBaseline = "middle";
    pen.fillStyle = colour[fill];
    pen.fillText(words, x, y);
  }
  function rule(x0, y0, x1, y1, stroke, width = 1, dash = []) {
    pen.beginPath();
    pen.setLineDash(dash);
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.strokeStyle = colour[stroke];
    pen.lineWidth = width;
    pen.stroke();
    pen.setLineDash([]);
  }
  function block(x0, x1, y, height, fill) {
    const from = Math.max(x0, LEFT), to = Math.min(x1, size().width - RIGHT);
    if (to <= from) return;
    pen.fillStyle = colour[fill];
    pen.fillRect(from, y, to - from, height);
  }
  function clipped(y, height, draw) {
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, y, size().width - LEFT - RIGHT, height);
    pen.clip();
    draw();
    pen.restore();
  }
  const tickPlace = (tick) => (axis === "time" ? data.planned.times[opMoment[tick]] : tick);

  function drawPhases() {
    const right = size().width - RIGHT, bottom = size().height - AXIS;
    data.phases.forEach((phase, index) => {
      const from = xOf(tickPlace(phase.first)), to = xOf(tickPlace(phase.end));
      block(from, to, TOP, bottom - TOP, phase.phase);
      const start = Math.max(from, LEFT), end = Math.min(to, right);
      if (end - start > 70) text(phase.phase, (start + end) / 2, TOP - 12, "quiet", "center");
      const turns = index > 0 && phase.phase === "backward" && from >= LEFT && from <= right;
      if (turns) {
        rule(from, TOP - 4, from, bottom, "turn", 1, [3, 3]);
        text("turn", from, TOP - 12, "turn", "center");
      }
    });
  }
  function drawMemoryAxis() {
    const right = size().width - RIGHT;
    for (let count = 0, step = byteStep(); count <= yTop; count += step) {
      const y = Math.round(yOf(count)) + 0.5;
      rule(LEFT, y, right, y, "grid");
      text(count ? bytesText(count).replace(/\.0+ /, " ") : "0", LEFT - 10, y, "quiet", "right");
    }
  }
  function drawAxis() {
    const { width, height } = size(), bottom = height - AXIS, span = view[1] - view[0];
    const inSeconds = axis === "time" && whole() >= 1 && span >= 0.5;
    const scale = axis === "ops" || inSeconds ? 1 : 1e3;
    let step = niceStep(span * scale, Math.max(3, (width - LEFT - RIGHT) / 110));
    if (axis === "ops") step = Math.max(1, step);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let mark = Math.ceil((view[0] * scale) / step) * step; mark <= view[1] * scale + step * 1e-6; mark += step) {
      const x = Math.round(xOf(mark / scale)) + 0.5;
      rule(x, bottom, x, bottom + 5, "quiet");
      text(mark.toFixed(digits), x, bottom + 15, "quiet", "center");
    }
    rule(LEFT, bottom + 0.5, width - RIGHT, bottom + 0.5, "edge");
    const name = axis === "ops" ? "op" : `predicted time, ${inSeconds ? "s" : "ms"}`;
    text(name, (LEFT + width - RIGHT) / 2, bottom + 32, "quiet", "center");
  }
  function drawCurve(curve, name, width) {
    const list = edges(curve), first = Math.max(find(list, view[0]) - 1, 0);
    const line = new Path2D();
    let x = xOf(list[first]), last = first;
    line.moveTo(x, yOf(curve.bytes[first]));
    for (let moment = first; moment < momentCount && list[moment] <= view[1]; moment++) {
      const y = yOf(curve.bytes[moment]);
      line.lineTo(xOf(list[moment]), y);
      x = xOf(list[moment + 1]);
      line.lineTo(x, y);
      last = moment;
    }
    const area = new Path2D(line);
    area.lineTo(x, yOf(0));
    area.lineTo(xOf(list[first]), yOf(0));
    area.closePath();
    pen.fillStyle = colour[name + "-fill"];
    pen.fill(area);
    pen.strokeStyle = colour[name];
    pen.lineWidth = width;
    pen.lineJoin = "round";
    pen.stroke(line);
    return last;
  }
  /** Names of the horizontal lines, right of the plot, pushed apart where they would meet. */
  function drawLabels() {
    const plain = data.plain.bytes.reduce((a, b) => Math.max(a, b), 0);
    const labels = [
      ["plain peak", plain, "plain"],
      ["limit", data.limit_bytes, "limit"],
      ["resting", data.resting_bytes, "quiet"],
    ].map(([name, count, fill]) => ({ name, count, fill, y: yOf(count) }));
    labels.sort((a, b) => a.y - b.y);
    for (let index = 1; index < labels.length; index++) labels[index].y = Math.max(labels[index].y, labels[index - 1].y + 34);
    for (let index = labels.length - 1, most = plotBottom() - 14; index >= 0; index--, most -= 34) labels[index].y = Math.min(labels[index].y, most);
    const x = size().width - RIGHT + 10;
    for (const label of labels) {
      text(label.name, x, label.y - 7, label.fill, "left", "600");
      text(bytesText(label.count), x, label.y + 8, label.fill);
    }
  }
  function drawMemory() {
    const right = size().width - RIGHT, bottom = plotBottom();
    clipped(TOP - 2, bottom - TOP + 3, () => {
      block(LEFT, right, yOf(data.resting_bytes), bottom - yOf(data.resting_bytes), "resting");
      drawCurve(data.plain, "plain", 1.5);
      drawCurve(data.planned, "planned", 2);
      const limit = Math.round(yOf(data.limit_bytes)) + 0.5;
      rule(LEFT, limit, right, limit, "limit", 1.5, [7, 5]);
    });
    rule(LEFT, bottom + 0.5, right, bottom + 0.5, "edge");
  }
  function drawLanes() {
    bars = [];
    lanes.forEach((lane, row) => {
      const y = plotBottom() + GAP + row * LANE;
      block(LEFT, size().width - RIGHT, y + 2, LANE - 4, "lane");
      text(lane.name, LEFT - 10, y + LANE / 2, "quiet", "right");
      if (!lane.bars.length) text("none", LEFT + 8, y + LANE / 2, "quiet");
      clipped(y, LANE, () => {
        for (const bar of lane.bars) {
          const from = xOf(place(bar.start)), to = Math.max(xOf(place(bar.end)), from + 1.5);
          if (to < LEFT || from > size().width - RIGHT) continue;
          bars.push({ from, to, y, row, bar });
          pen.globalAlpha = 0.88;
          // A hairline between neighbours, as long as there is room for it.
          block(from, to - from > 3 ? to - 0.7 : to, y + 5, LANE - 10, lane.colour);
          pen.globalAlpha = 1;
        }
      });
    });
  }
  function drawAway(hit) {
    if (hit === null) return;
    const value = data.absent[hit.bar.absence];
    block(xOf(place(value.gone)), xOf(place(value.back)), TOP, plotBottom() - TOP, "away");
    for (const bar of bars) {
      if (bar.bar.absence !== hit.bar.absence) continue;
      pen.strokeStyle = colour.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(bar.from, bar.y + 4, bar.to - bar.from, LANE - 8);
    }
  }
  function draw() {
    const ratio = window.devicePixelRatio || 1, { width, height } = size();
    const wide = Math.round(width * ratio), high = Math.round(height * ratio);
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    drawPhases();
    drawMemoryAxis();
    drawMemory();
    drawLabels();
    drawLanes();
    drawAxis();
    drawPointer();
  }
  let queued = false;
  function redraw() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; draw(); });
  }

  // ---- pointing
  function under() {
    if (!pointer) return null;
    const near = bars.filter((bar) => pointer.y >= bar.y && pointer.y < bar.y + LANE && pointer.x >= bar.from - 2 && pointer.x <= bar.to + 2);
    return near.length ? near.reduce((a, b) => (b.to - b.from < a.to - a.from ? b : a)) : null;
  }
  function dot(x, count, fill) {
    if (x < LEFT || x > size().width - RIGHT) return;
    pen.beginPath();
    pen.arc(x, yOf(count), 4, 0, 7);
    pen.fillStyle = colour[fill];
    pen.fill();
    pen.strokeStyle = colour.card;
    pen.lineWidth = 1.5;
    pen.stroke();
  }
  function drawPointer() {
    const inside = pointer && !drag && pointer.x >= LEFT && pointer.x <= size().width - RIGHT && pointer.y >= TOP && pointer.y <= size().height - AXIS;
    tip.hidden = !inside;
    if (!inside) return;
    const hit = under();
    drawAway(hit);
    rule(pointer.x, TOP, pointer.x, size().height - AXIS, "quiet", 1, [2, 3]);
    const moment = Math.min(find(edges(data.planned), positionOf(pointer.x)), momentCount - 1);
    if (hit) fillTip(...barTip(hit));
    else {
      dot(xOf(edges(data.plain)[moment]), data.plain.bytes[moment], "plain");
      dot(pointer.x, data.planned.bytes[moment], "planned");
      fillTip(...momentTip(moment));
    }
  }
  function momentTip(moment) {
    const tick = Math.min(tickOf[moment], opCount - 1), count = data.planned.bytes[moment];
    const left = data.limit_bytes - count;
    return [data.words[data.ops[tick]], data.words[data.modules[tick]], [
      ["op", String(tick)],
      ["starts at", secondsText(data.planned.times[opMoment[tick]])],
      ["with the plan", bytesText(count)],
      ["without", bytesText(data.plain.bytes[moment])],
      [left < 0 ? "above the limit" : "below the limit", left === 0 ? "0" : bytesText(Math.abs(left))],
    ]];
  }
  function barTip(hit) {
    const bar = hit.bar;
    const rows = [["starts at", secondsText(bar.start)], ["takes", secondsText(bar.end - bar.start)]];
    const value = data.absent[bar.absence];
    const name = bar.reason ? `compute waits for the copy ${bar.reason === "release" ? "out" : "in"}` : lanes[hit.row].each;
    if (bar.issued !== undefined) {
      rows.push(["waited in the queue", secondsText(bar.start - bar.issued)]);
      rows.push(["at", bytesText(value.bytes / Math.max(bar.end - bar.start, 1e-9)) + "/s"]);
    }
    rows.unshift(["bytes", bytesText(value.bytes)]);
    return [`${name}: value ${value.value} of ${value.op}`, [value.module, value.decision].filter(Boolean).join("\n"), rows];
  }
  function element(name, words) {
    const made = document.createElement(name);
    made.textContent = words;
    return made;
  }
  function fillTip(title, below, rows) {
    const list = document.createElement("dl");
    for (const [name, words] of rows) list.append(element("dt", name), element("dd", words));
    const lines = below.split("\n").filter(Boolean).map((line) => { const made = element("div", line); made.className = "quiet"; return made; });
    tip.replaceChildren(element("b", title), ...lines, list);
    const beside = pointer.x + 18 + tip.offsetWidth > size().width ? pointer.x - 18 - tip.offsetWidth : pointer.x + 18;
    tip.style.left = Math.max(0, beside) + "px";
    // Above the lanes, so that no bar is covered.
    tip.style.top = Math.max(0, Math.min(pointer.y - 20, plotBottom() - tip.offsetHeight)) + "px";
  }

  // ---- moving
  function show(from, to) {
    const least = axis === "time" ? total / 2000 : Math.min(4, opCount);
    const span = Math.min(Math.max(to - from, least), whole());
    const start = Math.min(Math.max((from + to - span) / 2, 0), whole() - span);
    view = [start, start + span];
    redraw();
  }
  function zoom(factor, around) {
    show(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
  }
  const middle = () => (view[0] + view[1]) / 2;
  function switchAxis(name) {
    if (name === axis) return;
    const full = view[1] - view[0] >= whole() * 0.999;
    // What is in sight stays in sight.
    const moved = view.map(name === "ops" ? tickAt : secondsAt);
    axis = name;
    if (full) show(0, whole()); else show(...moved);
    document.querySelectorAll("[data-axis]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === name)));
  }
  canvas.addEventListener("pointermove", (event) => {
    pointer = { x: event.offsetX, y: event.offsetY };
    if (drag) {
      const shift = ((drag.x - pointer.x) / (size().width - LEFT - RIGHT)) * (drag.view[1] - drag.view[0]);
      show(drag.view[0] + shift, drag.view[1] + shift);
    }
    redraw();
  });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, view: [...view] };
    canvas.setPointerCapture(event.pointerId);
  });
  const drop = () => { drag = null; redraw(); };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", drop);
  canvas.addEventListener("pointerleave", () => { pointer = null; redraw(); });
  canvas.addEventListener("dblclick", () => show(0, whole()));
  canvas.addEventListener("wheel", (event) => {
    const outwards = event.deltaY > 0 && view[1] - view[0] >= whole() * 0.999;
    // With the whole step in sight there is nothing to zoom out to: let the page scroll.
    if (outwards) return;
    event.preventDefault();
    const shift = (event.deltaX / size().width) * (view[1] - view[0]);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) show(view[0] + shift, view[1] + shift);
    else zoom(Math.exp(event.deltaY * 0.0015), positionOf(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const shift = (view[1] - view[0]) / 8;
    const actions = { "+": () => zoom(0.5, middle()), "-": () => zoom(2, middle()), 0: () => show(0, whole()), ArrowLeft: () => show(view[0] - shift, view[1] - shift), ArrowRight: () => show(view[0] + shift, view[1] + shift) };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });
  document.querySelectorAll("[data-axis]").forEach((button) => button.addEventListener("click", () => switchAxis(button.dataset.axis)));
  document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => {
    if (button.dataset.zoom === "reset") show(0, whole()); else zoom(Number(button.dataset.zoom), middle());
  }));

  // ---- light and dark
  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    const style = getComputedStyle(document.documentElement);
    for (const key of ["card", "ink", "quiet", "grid", "edge", "planned", "planned-fill", "plain", "plain-fill", "limit", "resting", "forward", "backward", "turn", "out", "in", "recomputed", "stall", "lane", "away"]) colour[key] = style.getPropertyValue("--" + key).trim();
    redraw();
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  new ResizeObserver(redraw).observe(canvas);
  setTheme(dark.matches ? "dark" : "light");
  draw();
})();
