(() => {
"use strict";
const LEVEL = 17, MEMORY = 64, STRIP = 28, WAITS = 14, TITLE = 20, GAP = 5, LABEL = 58, UNIT = 1e7;
const make = (name, more = {}, ...inside) => {
  const node = Object.assign(document.createElement(name), more);
  node.append(...inside);
  return node;
};
const time = (ticks) => {
  const s = ticks / UNIT;
  for (const [factor, unit] of [[1, "s"], [1e3, "ms"], [1e6, "us"]])
    if (Math.abs(s * factor) >= 1 || unit === "us") return `${(s * factor).toPrecision(3)} ${unit}`;
};
const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < 4) { n /= 1024; i += 1; }
  return `${i ? n.toPrecision(3) : n} ${units[i]}`;
};

function timeline(box, data) {
  const words = data.words, paper = make("canvas", { tabIndex: 0 });
  const said = make("p", { className: "readout" });
  said.setAttribute("aria-live", "polite");
  paper.setAttribute("role", "img");
  paper.setAttribute("aria-label", "Timeline of the step. Arrow keys move, plus and minus zoom, n and p step through operators, 0 shows all.");
  let from = 0, to = data.end, chosen = null, drag = null;
  const lanes = [];
  for (const step of data.steps) {
    if (data.steps.length > 1) lanes.push({ name: "", title: step.title, height: TITLE });
    lanes.push({ name: "memory", height: MEMORY, points: step.memory });
    step.modules.forEach((spans, i) => lanes.push({ name: i ? "" : "modules", height: LEVEL, spans, level: i, last: i === step.modules.length - 1 }));
    lanes.push({ name: "host", height: STRIP, spans: step.host, kind: "host" });
    if (step.device.length) lanes.push({ name: "device", height: STRIP, spans: step.device, kind: "device" });
    if (step.waits.length) lanes.push({ name: "waits", height: WAITS, spans: step.waits, kind: "waits" });
  }
  const operators = data.steps.flatMap((step) => step.host);
  let bottom = 0;
  for (const lane of lanes) { lane.y = bottom; bottom += lane.height + (lane.level !== undefined && !lane.last ? 1 : GAP); }
  const colour = (name) => getComputedStyle(box).getPropertyValue(name).trim();
  const wide = () => Math.max(paper.clientWidth - LABEL, 1);
  const place = (t) => LABEL + (t - from) / (to - from) * wide();
  const limit = () => {
    const size = Math.min(Math.max(to - from, 20), data.end);
    from = Math.min(Math.max(from, 0), data.end - size);
    to = from + size;
  };
  const move = (a, b) => { from = a; to = b; limit(); draw(); };
  const zoom = (factor, at = (from + to) / 2) => move(at - (at - from) * factor, at + (to - at) * factor);
  const first = (spans, t) => {
    let low = 0, high = spans.length;
    while (low < high) { const middle = (low + high) >> 1; if (spans[middle][0] < t) low = middle + 1; else high = middle; }
    return Math.max(low - 1, 0);
  };
  function draw() {
    const scale = window.devicePixelRatio || 1, g = paper.getContext("2d");
    paper.width = paper.clientWidth * scale;
    paper.height = bottom * scale;
    paper.style.height = `${bottom}px`;
    g.scale(scale, scale);
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    const ink = colour("--ink"), dim = colour("--dim"), sunk = colour("--sunk");
    for (const lane of lanes) {
      g.fillStyle = sunk;
      if (!lane.title) g.fillRect(LABEL, lane.y, wide(), lane.height);
      if (lane.points) memory(g, lane);
      if (lane.spans) strip(g, lane, ink);
    }
    g.fillStyle = colour("--paper");
    g.fillRect(0, 0, LABEL, bottom);
    g.fillStyle = dim;
    for (const lane of lanes) {
      g.fillText(lane.name, 0, lane.y + lane.height / 2);
      if (lane.points) g.fillText(data.top[1], LABEL + 4, lane.y + 9);
    }
    g.fillStyle = ink;
    g.font = "600 13px system-ui, sans-serif";
    for (const lane of lanes) if (lane.title) g.fillText(lane.title, 0, lane.y + lane.height / 2);
    range.textContent = `${time(from)} to ${time(to)} of ${time(data.end)}`;
  }
  function memory(g, lane) {
    const points = lane.points;
    g.fillStyle = colour("--k-area");
    g.beginPath();
    let x = LABEL, y = lane.y + lane.height;
    g.moveTo(x, y);
    for (let i = first(points, from); i < points.length && points[i][0] <= to; i += 1) {
      x = Math.max(place(points[i][0]), LABEL);
      g.lineTo(x, y);
      y = lane.y + lane.height * (1 - points[i][1] / (data.top[0] || 1) * 0.94);
      g.lineTo(x, y);
    }
    if (points.length && points[points.length - 1][0] > to) x = LABEL + wide();
    g.lineTo(x, y);
    g.lineTo(x, lane.y + lane.height);
    g.fill();
  }
  function strip(g, lane, ink) {
    let drawn = -1;
    for (let i = lane.kind ? first(lane.spans, from) : 0; i < lane.spans.length; i += 1) {
      const span = lane.spans[i];
      if (span[0] > to) break;
      const x = Math.max(place(span[0]), LABEL), end = Math.min(place(span[0] + span[1]), LABEL + wide());
      if (end < LABEL || end <= drawn) continue;
      const size = Math.max(end - x, 0.6);
      if (x + size <= drawn + 0.3) continue;
      g.fillStyle = fill(lane, span);
      g.fillRect(x, lane.y, size > 3 ? size - 0.5 : size, lane.height);
      drawn = x + size;
      if (size > 16) {
        g.fillStyle = lane.kind ? "#fff" : ink;
        const name = words[span[2]], parts = lane.kind ? [] : name.split(".");
        const text = [name, parts.slice(-2).join("."), parts[parts.length - 1]].find((one) => /[a-z]/i.test(one) && g.measureText(one).width < size - 6);
        if (text) g.fillText(text, x + 3, lane.y + lane.height / 2);
      }
      if (lane.kind === "host" && span === chosen) {
        g.strokeStyle = ink;
        g.lineWidth = 2;
        g.strokeRect(x + 1, lane.y + 1, Math.max(size - 2, 2), lane.height - 2);
      }
    }
  }
  function fill(lane, span) {
    if (lane.kind === "waits") return colour("--p-waiting");
    if (lane.kind) return phase(words[span[3]]);
    return colour(`--m-${(span[2] + lane.level) % 4}`);
  }
  const known = {};
  const phase = (name) => known[name] || (known[name] = colour(`--p-${name}`) || colour("--dim"));
  function tell(lane, span) {
    const name = words[span[2]], took = time(span[1]);
    if (lane.kind !== "host") {
      const what = lane.kind ? lane.kind : "module";
      said.textContent = `${what}: ${name}, ${took} from ${time(span[0])}`;
      return;
    }
    const parts = [`${name}, ${took}`, words[span[3]], words[span[4]], words[span[5]]];
    if (span[6]) parts.push(`made ${bytes(span[6])}`);
    said.textContent = parts.filter(Boolean).join(" \u00b7 ");
  }
  function under(event) {
    const edge = paper.getBoundingClientRect(), x = event.clientX - edge.left, y = event.clientY - edge.top;
    const lane = lanes.find((one) => one.spans && y >= one.y && y <= one.y + one.height);
    if (!lane || x < LABEL) return null;
    const slack = 2 * (to - from) / wide(), t = from + (x - LABEL) / wide() * (to - from);
    const at = lane.spans.findIndex((s) => s[0] - slack <= t && t <= s[0] + s[1] + slack);
    return at < 0 ? null : [lane, lane.spans[at]];
  }
  function step(by) {
    const at = chosen ? operators.indexOf(chosen) + by : first(data.steps[0].host, from) + (by > 0 ? by : 0);
    chosen = operators[Math.min(Math.max(at, 0), operators.length - 1)];
    const size = to - from;
    if (chosen[0] < from || chosen[0] + chosen[1] > to) { from = chosen[0] - size / 2; to = from + size; limit(); }
    tell({ kind: "host" }, chosen);
    draw();
  }
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => move(0, data.end),
    ArrowLeft: () => move(from - (to - from) / 5, to - (to - from) / 5),
    ArrowRight: () => move(from + (to - from) / 5, to + (to - from) / 5),
    n: () => step(1), p: () => step(-1),
  };
  paper.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  });
  paper.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    const x = event.clientX - paper.getBoundingClientRect().left - LABEL;
    zoom(event.deltaY > 0 ? 1.25 : 0.8, from + x / wide() * (to - from));
    event.preventDefault();
  }, { passive: false });
  paper.addEventListener("dblclick", (event) => {
    const x = event.clientX - paper.getBoundingClientRect().left - LABEL;
    zoom(0.5, from + x / wide() * (to - from));
  });
  paper.addEventListener("pointerdown", (event) => { drag = [event.clientX, from, to]; paper.setPointerCapture(event.pointerId); });
  paper.addEventListener("pointerup", (event) => {
    const found = under(event);
    if (drag && Math.abs(event.clientX - drag[0]) < 4 && found) {
      chosen = found[0].kind === "host" ? found[1] : null;
      tell(found[0], found[1]);
      draw();
    }
    drag = null;
  });
  paper.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = (drag[0] - event.clientX) / wide() * (drag[2] - drag[1]);
      move(drag[1] + by, drag[2] + by);
      return;
    }
    const found = under(event);
    if (found) tell(found[0], found[1]);
  });
  const button = (text, label, does) => {
    const made = make("button", { type: "button", textContent: text, title: label });
    made.setAttribute("aria-label", label);
    made.addEventListener("click", does);
    return made;
  };
  const range = make("span", { className: "dim n" });
  const tools = make("div", { className: "tools" },
    button("\u2212", "Zoom out (-)", () => zoom(1 / 0.6)), button("+", "Zoom in (+)", () => zoom(0.6)),
    button("\u2190", "Earlier", keys.ArrowLeft), button("\u2192", "Later", keys.ArrowRight),
    button("All", "The whole step (0)", () => move(0, data.end)), range);
  said.textContent = "Point at something, or focus the picture: arrows move, + and - zoom, n and p go from operator to operator.";
  box.append(make("div", { className: "zoom" }, tools, paper, said));
  box.classList.add("live");
  const again = () => { Object.keys(known).forEach((name) => delete known[name]); draw(); };
  new ResizeObserver(draw).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
}

function sortable(table) {
  const body = table.tBodies[0], rows = [...body.rows];
  const value = (row, i) => row.cells[i].dataset.v ?? row.cells[i].textContent;
  [...table.tHead.rows[0].cells].forEach((head, i) => {
    const sort = make("button", { type: "button", textContent: head.textContent });
    head.replaceChildren(sort);
    sort.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numbers = rows.length > 0 && rows[0].cells[i].dataset.v !== undefined;
      rows.sort((a, b) => (down ? -1 : 1) * (numbers ? value(a, i) - value(b, i) : value(b, i).localeCompare(value(a, i))));
      body.append(...rows);
    });
  });
  const count = make("span", { className: "dim" });
  const input = make("input", { type: "search", placeholder: "Filter: name, phase or file" });
  input.setAttribute("aria-label", "Filter operators by name, phase or file");
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = input.value ? `${shown} of ${rows.length} rows` : "";
  });
  table.closest(".scroll").before(make("div", { className: "tools" }, input, count));
}

const box = document.getElementById("timeline"), source = document.getElementById("timeline-data");
if (box && source) timeline(box, JSON.parse(source.textContent));
document.querySelectorAll("table.sortable").forEach(sortable);
})();
