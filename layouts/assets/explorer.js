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

  let pinned = null;
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
    byId("x-thread").value = thread === null ? "" : thread;
    const where = new Set(found.map((c) => c.figure)).size;
    byId("x-found").textContent = thread === null ? "Enter on a cell follows its thread; Escape ends it."
      : found.length ? `Thread ${thread}: ${found.length} cells in ${where} figures.`
        : `Thread ${thread} occurs in no figure.`;
    highlight(null);
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
    if (c && c.threads.length) follow(c.threads[0]);
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
    if (e.key === "Escape") { follow(null); leave(); return; }
    const cell = cellAt(e.target);
    if (!cell) return;
    if (DIRECTIONS[e.key]) {
      const next = neighbour(cell, DIRECTIONS[e.key]);
      e.preventDefault();
      if (!next) return;
      cell.node.setAttribute("tabindex", "-1");
      next.node.setAttribute("tabindex", "0");
      next.node.focus();
    } else if ((e.key === "Enter" || e.key === " ") && cell.threads.length) {
      e.preventDefault();
      follow(cell.threads[0]);
    }
  });
  byId("x-thread").addEventListener("input", (e) => follow(e.target.value === "" ? null : Number(e.target.value)));
  byId("x-clear").addEventListener("click", () => follow(null));

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
  byId("x-back").addEventListener("click", () => go(at - 1));
  byId("x-next").addEventListener("click", () => go(at + 1));
  count();
})();
