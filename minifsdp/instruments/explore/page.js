"use strict";
// The page draws a run's own log: nothing here knows what FSDP does. Log entries of a rank, in program order:
// [t, "name"] a moment; [t, null, row, parameters, gradient] a state; [t, tag, bytes, ...] memory. t in microseconds.

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const chosen = { rung: DATA.first, variant: DATA.rungs[DATA.first].own, rank: 0, place: 0 };
const MIB = 2 ** 20;
// Without a shard among its states, a parameter that is whole is replicated, not gathered.
for (const rung of DATA.rungs)
  for (const step of rung.variants) step.sharded = step.ranks[0].entries.some((entry) => entry[1] === null && entry[3] === "shard");
const step = () => DATA.rungs[chosen.rung].variants[chosen.variant];
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

// State after each entry, by rank: bytes by tag, and what is held of each unit.
function replay(step, rank) {
  const { start, entries } = step.ranks[rank];
  const bytes = [start.slice()], held = [step.units.map(() => ["whole", "none"])];
  for (const [, what, ...rest] of entries) {
    const now = bytes.at(-1), units = held.at(-1);
    if (typeof what === "number") {
      const next = now.slice();
      [what, ...rest].forEach((each, i, all) => { if (i % 2 === 0) next[each] += all[i + 1]; });
      bytes.push(next); held.push(units);
    } else {
      bytes.push(now);
      held.push(what === null ? units.map((each, row) => (row === rest[0] ? rest.slice(1) : each)) : units);
    }
  }
  return { bytes, held };
}

const replays = new Map();
function states(rank) {
  const key = `${chosen.rung} ${chosen.variant} ${rank}`;
  if (!replays.has(key)) replays.set(key, replay(step(), rank));
  return replays.get(key);
}
const entriesOf = (rank) => step().ranks[rank].entries;
const timeOf = (rank, place) => (place === 0 ? 0 : entriesOf(rank)[place - 1][0]);
function placeAt(rank, time) {
  const entries = entriesOf(rank);
  let low = 0, high = entries.length;
  while (low < high) { const middle = (low + high) >> 1; if (entries[middle][0] <= time) low = middle + 1; else high = middle; }
  return low;
}
const isEvent = ([, what]) => typeof what !== "number";

// Colours: whole is filled, on its way is hatched, a shard is as wide as its share.
const C = DATA.colours;
const hatch = (colour) => `repeating-linear-gradient(135deg, ${colour} 0 3px, ${C.white} 3px 6px)`;
function bar(state, whole, shard) {
  if (state === "none") return ["0%", "none"];
  if (state === "shard") return [`${100 / DATA.ranks}%`, shard];
  return ["100%", state === "whole" ? whole : hatch(whole)];
}
const holding = ([parameters, gradient]) => {
  const replicated = parameters === "whole" && !step().sharded;
  const bars = [bar(parameters, replicated ? C.parameters : C.unsharded, C.parameters), bar(gradient, C.gradients, C.gradients)];
  return `<div class="cell">${bars.map(([width, colour]) => `<i><b style="width:${width};background:${colour}"></b></i>`).join("")}</div>`;
};

// The picture of a step: a row for each unit, the lanes, and memory, on one axis of time.
const LEFT = 150, UNIT = 17, LANE = 20, MEMORY = 150, AXIS = 24;
function drawStep() {
  const { length, spans, units } = step(), width = Math.max(340, byId("step").clientWidth), names = width < 600 ? 112 : LEFT;
  const x = (t) => names + (t / length) * (width - names - 4);
  const { bytes, held } = states(chosen.rank), entries = entriesOf(chosen.rank), parts = [];
  const rect = (a, b, y, h, fill, title = "") =>
    parts.push(`<rect x="${x(a).toFixed(1)}" y="${y}" width="${Math.max(0.6, x(b) - x(a)).toFixed(1)}" height="${h}" fill="${fill}">${title && `<title>${escaped(title)}</title>`}</rect>`);
  const name = (text, y) => parts.push(`<text x="${names - 8}" y="${y}" text-anchor="end">${escaped(text)}</text>`);
  units.forEach((unit, row) => {
    const y = row * UNIT;
    name(unit, y + 12);
    let since = 0;
    for (let place = 1; place <= held.length; place++) {
      const last = place === held.length;
      if (!last && held[place][row] === held[place - 1][row]) continue;
      const from = timeOf(chosen.rank, since), to = last ? length : timeOf(chosen.rank, place), [p, g] = held[since][row];
      const replicated = !step().sharded;
      rect(from, to, y + (p === "shard" ? 4 : 1), p === "shard" ? 3 : 6, p === "on its way" ? "url(#coming)" : p === "shard" || replicated ? C.parameters : C.unsharded, `${unit}: parameters ${p}`);
      if (g !== "none") rect(from, to, y + 8, g === "shard" ? 3 : 6, g === "on its way" ? "url(#leaving)" : C.gradients, `${unit}: gradient ${g}`);
      since = place;
    }
  });
  let y = units.length * UNIT + 8;
  const order = Object.keys(DATA.lanes), rank = (lane) => order.indexOf(lane.split(" ")[0]);
  const lanes = [...new Set(spans.map(([lane]) => lane))].filter((lane) => lane !== "phase").sort((a, b) => rank(a) - rank(b));
  for (const lane of lanes) {
    name(lane === "wait" ? "host waits" : lane, y + 13);
    for (const [which, what, start, duration] of spans)
      if (which === lane) rect(start, start + duration, y, LANE - 4, lane === "communication" && /reduce/i.test(what) ? C.reduction : DATA.lanes[lane.split(" ")[0]], `${what}, ${(duration / 1000).toFixed(2)} ms`);
    y += LANE;
  }
  const top = y + 10, most = Math.max(...bytes.map((each) => each.reduce((a, b) => a + b)));
  const scale = (value) => top + MEMORY * (1 - value / most);
  const below = bytes.map(() => 0);
  DATA.tags.forEach((tag, i) => {
    let up = "", back = "";
    bytes.forEach((each, place) => {
      const from = x(timeOf(chosen.rank, place)).toFixed(1), to = x(place + 1 < bytes.length ? timeOf(chosen.rank, place + 1) : length).toFixed(1);
      const low = scale(below[place]).toFixed(1); below[place] += each[i];
      const high = scale(below[place]).toFixed(1);
      up += `L${from} ${high}L${to} ${high}`; back = `L${to} ${low}L${from} ${low}${back}`;
    });
    parts.push(`<path d="M${(up + back).slice(1)}Z" fill="${C[tag]}"><title>${tag}</title></path>`);
  });
  name(`${(most / MIB).toFixed(1)} MiB`, top + 10); name("0", top + MEMORY);
  const bottom = top + MEMORY;
  for (const [which, what, start] of spans)
    if (which === "phase") parts.push(`<path d="M${x(start)} 0V${bottom}" stroke="${C.ink}" stroke-width="0.7"/><text class="soft" ${x(start) > width - 70 ? `text-anchor="end" x="${width - 2}"` : `x="${x(start) + 3}"`} y="${bottom + 16}">${what}</text>`);
  const hatched = (id, colour) => `<pattern id="${id}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="5" height="5" fill="${C.white}"/><rect width="2.6" height="5" fill="${colour}"/></pattern>`;
  byId("step").innerHTML = `<svg viewBox="0 0 ${width} ${bottom + AXIS}" height="${bottom + AXIS}"><defs>${hatched("coming", C.unsharded)}${hatched("leaving", C.gradients)}</defs>${parts.join("")}<path id="cursor" d="M0 0V${bottom}" stroke="${C.black}" stroke-width="1.6"/></svg>`;
  const svg = byId("step").firstChild;
  const drag = (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) * width) / box.width;
    show(placeAt(chosen.rank, Math.max(0, ((at - names) / (width - names - 4)) * length)));
  };
  svg.onpointerdown = (event) => { svg.setPointerCapture(event.pointerId); svg.onpointermove = drag; drag(event); };
  svg.onpointerup = () => { svg.onpointermove = null; };
  drawStep.x = x;
}

function show(place) {
  const entries = entriesOf(chosen.rank), last = entries.length;
  chosen.place = Math.min(last, Math.max(0, place));
  const time = timeOf(chosen.rank, chosen.place), { bytes } = states(chosen.rank), now = bytes[chosen.place];
  byId("place").max = last; byId("place").value = chosen.place;
  const said = entries.slice(0, chosen.place).reverse().find(isEvent), { units } = step();
  const words = !said ? "before the step" : said[1] ?? `${units[said[2]]}: parameters ${said[3]}, gradient ${said[4]}`;
  byId("now").textContent = `${(time / 1000).toFixed(2)} of ${(step().length / 1000).toFixed(1)} ms: ${words}`;
  byId("cursor").setAttribute("transform", `translate(${drawStep.x(time)} 0)`);
  const ranks = [...Array(DATA.ranks).keys()];
  const heldNow = ranks.map((rank) => states(rank).held[rank === chosen.rank ? chosen.place : placeAt(rank, time)]);
  const head = ranks.map((rank) => `<th class="${rank === chosen.rank ? "chosen" : ""}">rank ${rank}</th>`).join("");
  byId("ranks").innerHTML = `<table class="holdings"><tr><th></th>${head}</tr>${units.map((unit, row) =>
    `<tr data-unit="${escaped(unit)}"><td>${escaped(unit)}</td>${heldNow.map((held) => `<td title="parameters ${held[row][0]}, gradient ${held[row][1]}">${holding(held[row])}</td>`).join("")}</tr>`).join("")}</table>`;
  const sum = (each) => each.reduce((a, b) => a + b), peak = Math.max(...bytes.map(sum));
  const line = (tag, value, colour) => `<tr data-tag="${tag}" data-bytes="${value}"><td>${colour ? `<span class="swatch" style="background:${colour}"></span>` : ""}${tag}</td><td>${(value / MIB).toFixed(3)} MiB</td><td>${value.toLocaleString("en")} B</td></tr>`;
  byId("bytes").innerHTML = DATA.tags.map((tag, i) => line(tag, now[i], C[tag])).reverse().join("") +
    line("total", sum(now)).replace("<tr", '<tr class="total"') + line("peak of the step", peak);
  byId("whose").textContent = `rank ${chosen.rank}`;
}

function choose() {
  const rung = DATA.rungs[chosen.rung];
  const select = (key, label, names) => names.length < 2 ? "" :
    `<label>${label}<select id="${key}">${names.map((each, i) => `<option value="${i}"${i === chosen[key] ? " selected" : ""}>${escaped(each)}</option>`).join("")}</select></label>`;
  byId("choices").innerHTML = select("rung", DATA.choice, DATA.rungs.map(({ name }) => name)) + select("variant", rung.varies, rung.variants.map(({ label }) => label)) +
    select("rank", "Rank", [...Array(DATA.ranks).keys()].map(String)) + `<span class="adds">${escaped(rung.adds)}</span>`;
  for (const key of ["rung", "variant", "rank"])
    if (byId(key)) byId(key).onchange = (event) => { const time = timeOf(chosen.rank, chosen.place) / step().length; chosen[key] = +event.target.value; if (key === "rung") chosen.variant = DATA.rungs[chosen.rung].own; choose(); draw(time); };
}

function draw(share) { drawStep(); show(placeAt(chosen.rank, share * step().length)); }
function move(by) {
  const entries = entriesOf(chosen.rank);
  let place = chosen.place + by;
  while (place > 0 && place < entries.length && !isEvent(entries[place - 1])) place += by;
  show(place);
}
let timer = null;
function stop() { clearInterval(timer); timer = null; byId("play").innerHTML = "&#9654;"; }
byId("play").onclick = () => {
  if (timer) return stop();
  if (chosen.place === entriesOf(chosen.rank).length) show(0);
  byId("play").innerHTML = "&#10074;&#10074;";
  timer = setInterval(() => { move(1); if (chosen.place === entriesOf(chosen.rank).length) stop(); }, 120);
};
byId("back").onclick = () => move(-1);
byId("next").onclick = () => move(1);
byId("place").oninput = (event) => show(+event.target.value);
document.onkeydown = (event) => {
  if (event.target.id === "place" || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  event.preventDefault(); move(event.key === "ArrowLeft" ? -1 : 1);
};
window.onresize = () => draw(timeOf(chosen.rank, chosen.place) / step().length);
byId("about").textContent = DATA.about;
byId("legend").innerHTML = [["parameters", C.parameters, DATA.ranks > 1 ? "thin: this rank's shard" : ""], ["on its way", hatch(C.unsharded), ""], ["unsharded", C.unsharded, ""], ["gradient", C.gradients, "thin: this rank's shard"], ["being reduced", hatch(C.gradients), ""],
  ["all-gather", DATA.lanes.communication, ""], ["reduction", C.reduction, ""]]
  .map(([what, colour, more]) => `<span><span class="swatch" style="background:${colour}"></span>${what}${more && ` (${more})`}</span>`).join("");
choose(); draw(0.4);
// A page that has this one in a frame may make the frame as high as it needs.
if (parent !== window)
  new ResizeObserver(() => parent.postMessage({ explorerHeight: document.documentElement.offsetHeight }, "*")).observe(document.documentElement);
