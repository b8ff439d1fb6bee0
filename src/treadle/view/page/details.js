// What the page says in words: titles, legend, totals of each rank, the tooltip, and what an op waits for.

function element(tag, text, parent, className) {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  if (className) made.className = className;
  parent?.append(made);
  return made;
}

function showTitles(traces, parent) {
  for (const trace of traces) {
    const line = element("div", null, parent);
    element("b", trace.name, line);
    const ops = `${trace.numOps.toLocaleString("en")} ops on ${plural(trace.numRanks, "rank")}`;
    element("span", [trace.size, ops, trace.about].filter(Boolean).join(", "), line);
  }
}

function showLegend(traces, kinds, roles, parent) {
  const seen = (trace) => [...new Set(trace.look.filter((_, op) => trace.laneTakesTime[trace.laneOf[op]]))];
  const used = new Set(traces.flatMap(seen).map((look) => 2 * kinds[look >> 1].role + (look & 1)));
  let dark = false;
  roles.forEach((role, i) => {
    const [first, later] = role.looks.map((look) => look.fill);
    const fills = [used.has(2 * i) && first, used.has(2 * i + 1) && later].filter(Boolean);
    if (!fills.length) return;
    dark ||= used.has(2 * i + 1) && first !== later;
    const entry = element("span", null, parent), box = element("i", null, entry);
    box.style.background = `linear-gradient(90deg, ${fills[0]} 50%, ${fills.at(-1)} 50%)`;
    entry.append(role.name);
  });
  const told = (trace) => (trace.isUpdate ? "on its source" : trace.twoWays ? "the other direction" : "");
  if (dark) element("span", `dark: ${traces.map(told).find(Boolean) ?? "later chunks"}`, parent);
}

// One table a trace; `choose(trace, rank)` is called for a click on a rank.
function showTotals(traces, parent, choose) {
  traces.forEach((trace, index) => {
    element("h2", traces.length > 1 ? trace.name : "Totals", parent);
    const { bubble, exposed } = trace.totals;
    element("p", `makespan ${trace.shortTime(trace.makespan)}, bubble ${percent(bubble)}, ` +
      `exposed communication ${trace.shortTime(exposed)} a rank`, parent);
    const table = element("table", null, parent), head = element("tr", null, element("thead", null, table));
    for (const name of ["rank", "busy", "idle", "bubble", "exposed", "peak"]) element("th", name, head);
    const body = element("tbody", null, table);
    trace.totals.ranks.forEach((row, rank) => {
      const line = element("tr", null, body), time = (ticks) => trace.shortTime(ticks);
      line.dataset.trace = index;
      line.dataset.rank = rank;
      const peak = bytesText(row.peak) + trace.savedUnit;
      const cells = [rank, time(row.busy), time(row.idle), percent(row.bubble), time(row.exposed), peak];
      for (const cell of cells) element("td", cell, line);
      line.addEventListener("click", () => choose(index, rank));
    });
  });
}

function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

function markChosen(chosen, parent) {
  for (const line of parent.querySelectorAll("tbody tr")) {
    line.classList.toggle("chosen", chosen[line.dataset.trace] === Number(line.dataset.rank));
  }
}

// The facts of an op, as pairs of a name and a text.
function facts(trace, op) {
  const found = [["rank", trace.rankOf(op)], ["lane", trace.lanes.name[trace.laneOf[op]]]];
  if (trace.mb[op] >= 0) found.push([trace.isUpdate ? "round" : "micro-batch", trace.mb[op]]);
  if (trace.isUpdate) found.push(["source", trace.layer[op]]);
  else found.push(["chunk", trace.chunk[op]]);
  if (trace.byLayer && trace.layer[op] >= 0) found.push(["layer", trace.layer[op]]);
  found.push(["start", trace.exactTime(trace.start[op])]);
  found.push(["duration", trace.exactTime(trace.end[op] - trace.start[op])]);
  if (trace.sizeBytes[op] > 0) found.push(["bytes", bytesText(trace.sizeBytes[op])]);
  const cause = trace.cause(op);
  found.push(["waited for", cause < 0 ? "nothing" : place(trace, cause)]);
  if (cause >= 0) found.push(["", `which ended at ${trace.exactTime(trace.end[cause])}`]);
  return found;
}

function place(trace, op) {
  return `${trace.text(op)}, rank ${trace.rankOf(op)} ${trace.lanes.name[trace.laneOf[op]]}`;
}

function showTooltip(tooltip, trace, op, x, y) {
  tooltip.replaceChildren();
  element("b", trace.text(op), tooltip);
  const list = element("dl", null, tooltip);
  for (const [name, text] of facts(trace, op)) {
    element("dt", name, list);
    element("dd", text, list);
  }
  tooltip.style.display = "block";
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const left = x + 16 + width > innerWidth - 8 ? x - 16 - width : x + 16;
  const top = Math.min(y + 18, innerHeight - height - 8);
  Object.assign(tooltip.style, { left: `${Math.max(8, left)}px`, top: `${Math.max(8, top)}px` });
}

// The op that was clicked, and both lists; a click on an entry goes there.
function showSelected(parent, trace, op, waits, waiters, go) {
  parent.replaceChildren();
  element("h2", trace.text(op), parent);
  const time = (ticks) => trace.exactTime(ticks);
  element("p", `rank ${trace.rankOf(op)} ${trace.lanes.name[trace.laneOf[op]]}, ` +
    `${time(trace.start[op])} to ${time(trace.end[op])}`, parent);
  const list = (title, className, ops, when) => {
    element("h3", `${title} (${ops.length})`, parent, className);
    const entries = element("ul", null, parent);
    for (const other of ops) {
      const entry = element("li", trace.text(other), entries);
      element("span", `rank ${trace.rankOf(other)}, ${when(other)}`, entry);
      entry.addEventListener("click", () => go(other));
    }
  };
  list("Waits for", "waits", waits, (other) => `ends ${time(trace.end[other])}`);
  list("Wait for it", "waiters", waiters, (other) => `starts ${time(trace.start[other])}`);
}

function showPath(parent, traces) {
  parent.replaceChildren();
  for (const trace of traces) {
    const { pathSummary: path } = trace;
    element("h2", traces.length > 1 ? `Critical path of ${trace.name}` : "Critical path", parent);
    const hops = `${plural(path.numHops, "time")} to another rank`;
    element("p", `${path.numOps.toLocaleString("en")} ops, ${trace.shortTime(path.length)}, ${hops}`, parent);
    const entries = element("ul", null, parent, "plain");
    const kinds = Object.entries(path.byKind).filter(([, spent]) => spent > 0);
    for (const [kind, spent] of kinds.sort((a, b) => b[1] - a[1])) {
      const entry = element("li", kind, entries);
      element("span", trace.shortTime(spent), entry);
    }
  }
}
