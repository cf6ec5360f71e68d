"use strict";
(() => {
  const data = JSON.parse(document.getElementById("x-data").textContent);
  const byId = (id) => document.getElementById(id);
  const figures = [...document.querySelectorAll(".x-figure")];
  const cells = []; // {node, facts, threads, figure}
  const ofThread = new Map();
  const ofSpace = new Map();

  const numbers = (text) => (text || "").split(", ").filter(Boolean).flatMap((run) => {
    const [a, b = a] = run.split("..").map(Number);
    return Array.from({ length: b - a + 1 }, (_, i) => a + i);
  });
  const push = (map, key, value) => (map.has(key) ? map.get(key).push(value) : map.set(key, [value]));

  figures.forEach((section, f) => {
    section.querySelectorAll("g.c").forEach((node, i) => {
      const facts = data.figures[f][i];
      if (!facts) return;
      const cell = { node, facts, threads: numbers(facts.t), figure: f, index: i };
      node.cell = cell;
      cells.push(cell);
      cell.threads.forEach((t) => push(ofThread, t, cell));
      if (facts.s && facts.o !== undefined) push(ofSpace, facts.s, cell);
      node.setAttribute("role", "img");
      const title = node.querySelector("title");
      if (title) node.setAttribute("aria-label", title.textContent);
      node.setAttribute("tabindex", "-1");
    });
    const first = cells.find((c) => c.figure === f);
    if (first) first.node.setAttribute("tabindex", "0");
  });

  const clear = (name) => document.querySelectorAll("." + name).forEach((n) => n.classList.remove(name));
  const overlapping = (cell) =>
    cell.facts.o === undefined ? [] : (ofSpace.get(cell.facts.s) || []).filter(
      (c) => c.facts.o < cell.facts.e && cell.facts.o < c.facts.e);

  const LABELS = [["t", "thread"], ["v", "value"], ["c", "coordinate"], ["s", "in"], ["o", "offset"],
    ["b", "byte"], ["k", "bank"], ["n", "note"]];
  function show(cell) {
    const list = byId("x-facts");
    list.replaceChildren();
    for (const [key, label] of LABELS) {
      let value = cell.facts[key];
      if (value === undefined) continue;
      if (key === "o" && cell.facts.e > value + 1) value = `${value}..${cell.facts.e - 1} elements`;
      else if (key === "o") value = `${value} elements`;
      else if (key === "b") value = `${value} bytes`;
      const term = document.createElement("dt");
      const fact = document.createElement("dd");
      term.textContent = label;
      fact.textContent = value;
      list.append(term, fact);
    }
  }

  let pinned = null; // the thread that is followed
  let chosen = null; // the cell that was clicked
  function highlight(cell) {
    ["x-here", "x-thread", "x-address"].forEach((name) => {
      document.querySelectorAll("g." + name).forEach((n) => n.classList.remove(name));
    });
    const threads = pinned === null ? (cell ? cell.threads : []) : [pinned];
    threads.forEach((t) => (ofThread.get(t) || []).forEach((c) => c.node.classList.add("x-thread")));
    if (!cell) return;
    overlapping(cell).forEach((c) => c.node.classList.add("x-address"));
    cell.node.classList.add("x-here");
    show(cell);
  }

  function follow(thread) {
    const found = thread === null ? [] : ofThread.get(thread) || [];
    pinned = found.length ? thread : null;
    document.body.classList.toggle("x-following", pinned !== null);
    byId("x-thread").value = thread === null ? "" : thread;
    const where = new Set(found.map((c) => c.figure)).size;
    byId("x-found").textContent = thread === null ? "Click a cell, or press Enter on it, to follow its thread; Escape ends it."
      : found.length ? `Thread ${thread}: ${found.length} cells in ${where} figures.`
        : `Thread ${thread} occurs in no figure.`;
    highlight(null);
  }
  function choose(cell) {
    chosen = cell;
    if (cell && cell.threads.length) follow(cell.threads[0]);
    if (cell) highlight(cell);
    keep();
  }

  const cellAt = (target) => {
    const node = target.closest ? target.closest("g.c") : null;
    return node && node.cell;
  };
  const main = byId("x-main");
  main.addEventListener("pointerover", (e) => { const c = cellAt(e.target); if (c) highlight(c); });
  main.addEventListener("focusin", (e) => { const c = cellAt(e.target); if (c) highlight(c); });
  main.addEventListener("click", (e) => {
    const c = cellAt(e.target);
    if (c) choose(c);
  });

  const center = (cell) => {
    const r = cell.node.querySelector("rect").getBoundingClientRect();
    return [r.x + r.width / 2, r.y + r.height / 2];
  };
  const DIRECTIONS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  function neighbour(cell, [dx, dy]) {
    const [x, y] = center(cell);
    let best = null;
    let least = Infinity;
    for (const c of cells) {
      if (c.figure !== cell.figure || c === cell) continue;
      const [cx, cy] = center(c);
      const along = (cx - x) * dx + (cy - y) * dy;
      const across = Math.abs((cx - x) * dy) + Math.abs((cy - y) * dx);
      if (along < 1) continue;
      const cost = along + 4 * across;
      if (cost < least) { least = cost; best = c; }
    }
    return best;
  }
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape") { chosen = null; follow(null); leave(); keep(); return; }
    const cell = cellAt(e.target);
    if (!cell) return;
    if (DIRECTIONS[e.key]) {
      const next = neighbour(cell, DIRECTIONS[e.key]);
      e.preventDefault();
      if (!next) return;
      cell.node.setAttribute("tabindex", "-1");
      next.node.setAttribute("tabindex", "0");
      next.node.focus();
    } else if (e.key === "Enter" || e.key === " ") {
      e.preventDefault();
      choose(cell);
    }
  });
  function typed(thread) {
    chosen = null;
    follow(thread);
    keep();
  }
  byId("x-thread").addEventListener("input", (e) => typed(e.target.value === "" ? null : Number(e.target.value)));
  byId("x-clear").addEventListener("click", () => typed(null));

  let at = -1;
  function leave() {
    clear("x-on");
    clear("x-quiet");
    at = -1;
    byId("x-step").textContent = "";
    byId("x-text").textContent = "";
    count();
  }
  function count() {
    const all = data.steps.length;
    byId("x-count").textContent = at < 0 ? `${all} steps` : `${at + 1} of ${all}`;
    byId("x-back").disabled = at <= 0;
    byId("x-next").disabled = at >= all - 1;
  }
  function go(to) {
    clear("x-on");
    clear("x-quiet");
    at = to;
    const step = data.steps[at];
    byId("x-step").textContent = step.title;
    byId("x-text").textContent = step.text;
    if (step.figure >= 0) {
      const section = figures[step.figure];
      const wanted = new Set(step.cells);
      section.querySelectorAll("g.c").forEach((n, i) => { if (wanted.has(i)) n.classList.add("x-on"); });
      section.classList.add("x-quiet");
      section.scrollIntoView({ block: "nearest" });
      const first = section.querySelector("g.x-on");
      if (first) first.scrollIntoView({ block: "nearest", inline: "center" });
    }
    count();
  }
  byId("x-back").addEventListener("click", () => { go(at - 1); keep(); });
  byId("x-next").addEventListener("click", () => { go(at + 1); keep(); });

  // Figures fill the page's width, but are not made smaller than LEAST for it: then they scroll.
  const LEAST = 0.6;
  const SCALES = [0.25, 0.35, 0.5, 0.6, 0.75, 1, 1.25, 1.5, 2, 3];
  const drawn = figures.map((section) => {
    const box = section.querySelector(".x-scroll");
    const svg = box.querySelector("svg");
    return { box, svg, width: svg.viewBox.baseVal.width };
  });
  let scale = null; // null: as the width asks for; 0: all of each figure
  const scaleOf = ({ box, width }) => scale ||
    Math.max(Math.min(1, box.clientWidth / width), scale === null ? LEAST : 0);
  function size() {
    drawn.forEach((d) => {
      d.svg.style.width = `${d.width * scaleOf(d)}px`;
      if (d.width * scaleOf(d) > d.box.clientWidth + 1) d.box.tabIndex = 0;
      else d.box.removeAttribute("tabindex");
    });
    byId("x-scale").textContent = scale ? `${Math.round(100 * scale)}%` : scale === 0 ? "fit" : "auto";
  }
  function zoom(by) { // from the largest or the smallest, where figures differ
    const now = (by > 0 ? Math.max : Math.min)(...drawn.map(scaleOf));
    const next = by > 0 ? SCALES.find((s) => s > now + 0.01) : SCALES.filter((s) => s < now - 0.01).pop();
    scale = next || now;
    size();
    keep();
  }
  byId("x-larger").addEventListener("click", () => zoom(1));
  byId("x-smaller").addEventListener("click", () => zoom(-1));
  byId("x-fit").addEventListener("click", () => { scale = 0; size(); keep(); });
  window.addEventListener("resize", size);

  // What is seen is kept behind the address's # and restored from there.
  function keep() {
    const state = new URLSearchParams();
    if (chosen) state.set("cell", `${chosen.figure}.${chosen.index}`);
    else if (pinned !== null) state.set("thread", pinned);
    if (at >= 0) state.set("step", at + 1);
    if (scale !== null) state.set("scale", scale ? Math.round(100 * scale) : "fit");
    history.replaceState(null, "", `#${state}`);
  }
  function restore() {
    const state = new URLSearchParams(location.hash.slice(1));
    const number = (key, most) => {
      const value = /^\d+$/.test(state.get(key)) ? Number(state.get(key)) : NaN;
      return value <= most ? value : null;
    };
    const percent = number("scale", 100 * SCALES[SCALES.length - 1]);
    scale = state.get("scale") === "fit" ? 0 : percent ? percent / 100 : null;
    size();
    const step = number("step", data.steps.length);
    leave();
    if (step) go(step - 1);
    const [f, i] = (state.get("cell") || "").split(".").map(Number);
    chosen = cells.find((c) => c.figure === f && c.index === i) || null;
    follow(chosen ? (chosen.threads.length ? chosen.threads[0] : null) : number("thread", Infinity));
    if (chosen) {
      highlight(chosen);
      if (!step) chosen.node.scrollIntoView({ block: "center", inline: "center" });
    }
  }
  document.querySelectorAll(".x-head nav a").forEach((link, f) => link.addEventListener("click", (e) => {
    e.preventDefault(); // the address keeps its state
    figures[f].scrollIntoView({ block: "start" });
  }));
  window.addEventListener("hashchange", restore);
  restore();
})();
