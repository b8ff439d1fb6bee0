// The page: what is shown, and what the mouse and the keys do to it. `window.treadle` is how a test looks at it.

const MOST_UNFOLDED = 64; // ranks; with more of them, lanes start folded
const STILL = 4; // pixels that a click may move

const $ = (id) => document.getElementById(id);

class Page {
  constructor(traces, kinds, roles) {
    Object.assign(this, { traces, kinds });
    this.makespan = Math.max(1, ...traces.map((trace) => trace.makespan));
    this.painter = new Painter($("plot"), kinds, roles);
    this.memoryPainter = new MemoryPainter($("memory"));
    this.folded = new Set();
    this.scroll = 0;
    this.lit = null; // or, for each trace, a map from op to why it is lit
    this.links = traces.map(() => []); // for each trace, arrows between lit ops: [from, to, why]
    this.selected = null;
    this.pathShown = false;
    this.chosen = traces.map((trace) => mostLoaded(trace)); // the rank whose memory is filled
    if (this.numRanks > MOST_UNFOLDED) this.foldAll();
    this.fit();
    this.layOut();
  }

  get numRanks() {
    return Math.max(...this.traces.map((trace) => trace.numRanks));
  }

  // Panes side by side in height; both scroll together, so that a rank is at the same place in each.
  layOut() {
    const headings = this.traces.length > 1 ? HEADING : 0;
    const height = Math.max(40, ($("plot").clientHeight - AXIS) / this.traces.length - headings);
    this.panes = this.traces.map((trace, i) => {
      return new Pane(trace, i, AXIS + headings + i * (height + headings), height, this.folded);
    });
    this.moveScroll(0);
  }

  // Draws once before the next frame, however often it is asked to.
  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.drawNow();
    });
  }

  drawNow() {
    const view = { from: this.from, to: this.to, scroll: this.scroll, folded: this.folded };
    this.painter.draw(this.panes, view, this.lit, this.links);
    this.memoryPainter.draw(this.traces, view, this.chosen);
  }

  // ---- what part is shown

  fit() {
    this.setView(-0.005 * this.makespan, 1.01 * this.makespan);
  }

  // Some of the step stays in sight, and no less than a few ticks are shown.
  setView(from, to) {
    const span = Math.min(Math.max(to - from, 20), 1.6 * this.makespan);
    const start = Math.min(Math.max(from, -0.8 * span), this.makespan - 0.2 * span);
    [this.from, this.to] = [start, start + span];
    this.redraw();
  }

  zoom(factor, x = (GUTTER + $("plot").clientWidth) / 2) {
    const at = this.timeAt(x), span = (this.to - this.from) * factor;
    if (span > 1.6 * this.makespan && factor > 1) return;
    const share = (at - this.from) / (this.to - this.from);
    this.setView(at - span * share, at + span * (1 - share));
  }

  pan(pixels) {
    const ticks = (pixels * (this.to - this.from)) / ($("plot").clientWidth - GUTTER);
    this.setView(this.from + ticks, this.to + ticks);
  }

  moveScroll(pixels) {
    const most = Math.max(0, ...this.panes.map((pane) => pane.content - pane.height));
    this.scroll = Math.min(Math.max(0, this.scroll + pixels), most);
    this.redraw();
  }

  timeAt(x) {
    return this.from + ((x - GUTTER) * (this.to - this.from)) / ($("plot").clientWidth - GUTTER);
  }

  // ---- folding

  toggleFold(rank) {
    if (!this.folded.delete(rank)) this.folded.add(rank);
    this.afterFolding();
  }

  foldAll() {
    for (let rank = 0; rank < this.numRanks; rank++) this.folded.add(rank);
  }

  toggleAllFolds() {
    if (this.folded.size === this.numRanks) this.folded.clear();
    else this.foldAll();
    this.afterFolding();
  }

  afterFolding() {
    $("fold").setAttribute("aria-pressed", this.folded.size === this.numRanks);
    this.layOut();
    this.redraw();
  }

  // ---- what is under a point of the plot, in pixels of the canvas

  rowAt(y) {
    const pane = this.panes.find((each) => y >= each.top && y < each.top + each.height);
    const row = pane?.rows.find((each) => {
      const top = pane.top + each.y - this.scroll;
      return y >= top && y < top + each.height;
    });
    return row === undefined ? null : { pane, row };
  }

  opAt(x, y) {
    const found = x < GUTTER ? null : this.rowAt(y);
    if (found === null) return null;
    const { pane, row } = found, { trace } = pane, time = this.timeAt(x);
    const slack = (1.5 * (this.to - this.from)) / ($("plot").clientWidth - GUTTER); // thin boxes can be hit too
    const stop = trace.lanes.ptr[row.lane + 1];
    let best = -1, distance = slack;
    for (let op = firstAbove(trace.reach, time - slack, trace.lanes.ptr[row.lane], stop); op < stop; op++) {
      if (trace.start[op] > time + slack) break;
      const away = Math.max(trace.start[op] - time, time - trace.end[op], 0);
      if (away < distance || (away === 0 && best < 0)) [best, distance] = [op, away];
      if (away === 0) break;
    }
    if (best < 0) return null;
    const [first, after] = trace.half(best), lower = y >= pane.top + row.y - this.scroll + row.height / 2;
    return { trace: pane.index, op: after - first > 1 && lower ? after - 1 : first === best ? best : first };
  }

  // ---- what is lit up

  clear() {
    this.lit = this.selected = null;
    this.links = this.traces.map(() => []);
    this.pathShown = false;
    $("path").setAttribute("aria-pressed", false);
    $("details").replaceChildren();
    this.redraw();
  }

  select(index, op) {
    this.clear();
    const trace = this.traces[index], waits = trace.waitsFor(op), waiters = trace.waitersOf(op);
    this.selected = { trace: index, op, waits, waiters };
    this.lit = this.traces.map(() => new Map());
    for (const other of waiters) this.lit[index].set(other, "waiters");
    for (const other of waits) this.lit[index].set(other, "waits");
    this.lit[index].set(op, "selected");
    this.links[index] = this.linksOf(index, op, waits, waiters);
    this.choose(index, trace.rankOf(op));
    showSelected($("details"), trace, op, waits, waiters, (other) => {
      this.select(index, other);
      this.bringIntoSight(index, other);
    });
  }

  // Arrows into an op from what it waits for, and out of it to what waits for it. Where a message has no row, they come
  // from the op that made it, and lead to the ones that read it; those are lit too.
  linksOf(index, op, waits, waiters) {
    const trace = this.traces[index], { rowOf } = this.panes[index], [first, after] = trace.half(op), found = [];
    const add = (others, why, forward) => {
      for (const other of new Set(others.flatMap((each) => trace.withRow(each, rowOf, forward)))) {
        if (other >= first && other < after) continue;
        found.push(forward ? [op, other, why] : [other, op, why]);
        if (!this.lit[index].has(other)) this.lit[index].set(other, why);
      }
    };
    add(waits, "waits", false);
    add(waiters, "waiters", true);
    return found;
  }

  // Along the critical path, from row to row.
  pathLinks(trace, index) {
    const { rowOf } = this.panes[index], shown = Array.from(trace.path).filter((op) => rowOf.has(trace.laneOf[op]));
    const links = shown.slice(1).map((op, i) => [shown[i], op, "path"]);
    return links.filter(([from, to]) => trace.laneOf[from] !== trace.laneOf[to]);
  }

  togglePath() {
    const show = !this.pathShown;
    this.clear();
    if (!show) return;
    this.pathShown = true;
    this.lit = this.traces.map((trace) => new Map(Array.from(trace.path, (op) => [op, "path"])));
    this.links = this.traces.map((trace, index) => this.pathLinks(trace, index));
    $("path").setAttribute("aria-pressed", true);
    showPath($("details"), this.traces);
  }

  choose(index, rank) {
    this.chosen[index] = rank;
    markChosen(this.chosen, $("totals"));
    this.redraw();
  }

  // Unfolds, scrolls and moves as far as needed, and zooms only if the op would be too thin to see.
  bringIntoSight(index, op) {
    const trace = this.traces[index], pane = () => this.panes[index], lane = trace.laneOf[op];
    if (!pane().rowOf.has(lane) && this.folded.has(trace.rankOf(op))) this.toggleFold(trace.rankOf(op));
    const row = pane().rows[pane().rowOf.get(lane)];
    if (row === undefined) return; // nothing on its lane takes time
    if (row.y < this.scroll || row.y + row.height > this.scroll + pane().height) {
      this.moveScroll(row.y - pane().height / 2 - this.scroll);
    }
    if (trace.start[op] >= this.from && trace.end[op] <= this.to) return;
    const middle = (trace.start[op] + trace.end[op]) / 2;
    const span = Math.max(this.to - this.from, 2 * (trace.end[op] - trace.start[op]));
    this.setView(middle - span / 2, middle + span / 2);
  }
}

// The rank that holds the most.
function mostLoaded(trace) {
  const peaks = trace.totals.ranks.map((rank) => rank.peak);
  return Math.max(0, peaks.indexOf(Math.max(...peaks)));
}

function listenToMouse(page) {
  const plot = $("plot"), tooltip = $("tooltip"), cursor = $("cursor");
  let held = null; // where the button went down, and where the mouse was last
  const at = (event) => {
    const box = plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const leave = () => {
    tooltip.style.display = cursor.style.display = "none";
  };
  const hover = (event) => {
    const [x, y] = at(event), found = page.opAt(x, y);
    plot.classList.toggle("pointing", found !== null || (x < GUTTER && page.rowAt(y) !== null));
    Object.assign(cursor.style, { display: x < GUTTER ? "none" : "block", left: `${x}px` });
    if (found === null) tooltip.style.display = "none";
    else showTooltip(tooltip, page.traces[found.trace], found.op, event.clientX, event.clientY);
  };
  const click = (event) => {
    const [x, y] = at(event), found = page.opAt(x, y), name = x < GUTTER ? page.rowAt(y) : null;
    if (found !== null) page.select(found.trace, found.op);
    else if (name !== null) page.toggleFold(name.row.rank);
    else page.clear();
  };
  plot.addEventListener("mousedown", (event) => {
    if (event.button !== 0) return;
    held = { x: event.clientX, y: event.clientY, lastX: event.clientX, lastY: event.clientY, moved: false };
  });
  window.addEventListener("mousemove", (event) => {
    if (held === null) return event.target === plot ? hover(event) : leave();
    held.moved ||= Math.hypot(event.clientX - held.x, event.clientY - held.y) > STILL;
    if (!held.moved) return undefined;
    plot.classList.add("grabbing");
    leave();
    page.pan(held.lastX - event.clientX);
    page.moveScroll(held.lastY - event.clientY);
    [held.lastX, held.lastY] = [event.clientX, event.clientY];
    return undefined;
  });
  window.addEventListener("mouseup", (event) => {
    if (held !== null && !held.moved) click(event);
    held = null;
    plot.classList.remove("grabbing");
  });
  plot.addEventListener("wheel", (event) => {
    event.preventDefault();
    leave();
    const [x] = at(event);
    if (event.shiftKey || x < GUTTER) page.moveScroll(event.deltaY || event.deltaX);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) page.pan(event.deltaX);
    else page.zoom(Math.exp(Math.max(-240, Math.min(240, event.deltaY)) * 0.002), x);
  }, { passive: false });
}

// One finger drags, two pinch, a tap is a click that shows the tooltip too.
function listenToTouch(page) {
  const plot = $("plot"), tooltip = $("tooltip");
  let held = null; // where the fingers were: their middle, how far apart, and if they moved
  const seen = (event) => {
    const box = plot.getBoundingClientRect(), touches = [...event.touches];
    const middle = (name) => touches.reduce((sum, touch) => sum + touch[name], 0) / touches.length;
    const [one, two] = touches, apart = two === undefined ? 0 : Math.abs(one.clientX - two.clientX);
    return { x: middle("clientX") - box.left, y: middle("clientY") - box.top, apart, number: touches.length };
  };
  plot.addEventListener("touchstart", (event) => {
    event.preventDefault(); // no mouse events after it
    tooltip.style.display = "none";
    held = { ...seen(event), moved: held !== null };
    [held.x0, held.y0] = [held.x, held.y];
  }, { passive: false });
  plot.addEventListener("touchmove", (event) => {
    event.preventDefault();
    if (held === null) return;
    const now = seen(event);
    held.moved ||= now.number > 1 || Math.hypot(now.x - held.x0, now.y - held.y0) > 2 * STILL;
    if (held.moved && now.number === held.number) {
      page.pan(held.x - now.x);
      page.moveScroll(held.y - now.y);
      if (now.apart > 10 && held.apart > 10) page.zoom(held.apart / now.apart, now.x);
    }
    if (held.moved) Object.assign(held, now);
  }, { passive: false });
  const leave = (event) => {
    event.preventDefault();
    if (event.touches.length) {
      held = { ...held, ...seen(event), moved: true };
      return;
    }
    const tap = held !== null && !held.moved ? held : null;
    held = null;
    if (tap === null || event.type === "touchcancel") return;
    const found = page.opAt(tap.x, tap.y), name = tap.x < GUTTER ? page.rowAt(tap.y) : null;
    if (found !== null) page.select(found.trace, found.op);
    else if (name !== null) page.toggleFold(name.row.rank);
    else page.clear();
    const box = plot.getBoundingClientRect();
    if (found !== null) showTooltip(tooltip, page.traces[found.trace], found.op, tap.x + box.left, tap.y + box.top);
  };
  plot.addEventListener("touchend", leave, { passive: false });
  plot.addEventListener("touchcancel", leave, { passive: false });
}

function listenToKeys(page) {
  const width = () => $("plot").clientWidth - GUTTER;
  const keys = {
    ArrowLeft: () => page.pan(-0.1 * width()),
    ArrowRight: () => page.pan(0.1 * width()),
    ArrowUp: () => page.moveScroll(-60),
    ArrowDown: () => page.moveScroll(60),
    "+": () => page.zoom(1 / 1.5),
    "=": () => page.zoom(1 / 1.5),
    "-": () => page.zoom(1.5),
    0: () => page.fit(),
    c: () => page.togglePath(),
    f: () => page.toggleAllFolds(),
    Escape: () => page.clear(),
  };
  window.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  $("path").addEventListener("click", () => page.togglePath());
  $("fold").addEventListener("click", () => page.toggleAllFolds());
  $("fit").addEventListener("click", () => page.fit());
  window.addEventListener("resize", () => {
    page.layOut();
    page.redraw();
  });
}

// For tests and for the console. Points are in pixels of the window, times in ticks from the trace's first start.
function outside(page) {
  const corner = () => $("plot").getBoundingClientRect();
  return {
    // The op drawn at a point: { trace, op }, or null.
    boxAt: (x, y) => page.opAt(x - corner().left, y - corner().top),
    // The middle of what is seen of an op: { x, y, width, height }, or null where it is not.
    positionOf(index, op) {
      page.drawNow();
      const { painter } = page, box = painter.box(page.panes[index], op, page.scroll), { left, top } = corner();
      if (box === null) return null;
      const x = left + (painter.left + (box.x0 + box.x1) / 2) / painter.ratio;
      const y = top + (painter.top + (box.above + box.below) / 2) / painter.ratio;
      return { x, y, width: (box.x1 - box.x0) / painter.ratio, height: (box.below - box.above) / painter.ratio };
    },
    // Shows the times between two.
    show: (from, to) => page.setView(from, to),
    // Unfolds, scrolls and moves until an op is in sight.
    find: (index, op) => page.bringIntoSight(index, op),
    // The most a rank holds, and when it first does: { peak, peakTime }.
    memory(index, rank) {
      const { peak, peakTime } = page.traces[index].memory(rank);
      return { peak, peakTime };
    },
    // What is shown and what is lit.
    state: () => ({
      from: page.from,
      to: page.to,
      scroll: page.scroll,
      selected: page.selected,
      path: page.pathShown,
      links: page.links,
      lit: page.lit?.map((ops) => [...ops.keys()]) ?? null,
      folded: [...page.folded],
      rows: page.panes.map((pane) => pane.rows.length),
      chosen: page.chosen,
    }),
    // Milliseconds from the start of the navigation to the second frame after the first full draw, once it was there.
    firstPaint: null,
  };
}

async function main() {
  const { roles, kinds, traces: shipped } = JSON.parse($("data").textContent);
  const traces = await Promise.all(shipped.map((trace) => Trace.load(trace, kinds)));
  $("titles").replaceChildren();
  showTitles(traces, $("titles"));
  showLegend(traces, kinds, roles, $("legend"));
  const page = new Page(traces, kinds, roles);
  showTotals(traces, $("totals"), (index, rank) => page.choose(index, rank));
  markChosen(page.chosen, $("totals"));
  listenToMouse(page);
  listenToTouch(page);
  listenToKeys(page);
  page.layOut();
  page.drawNow();
  $("preview").remove();
  window.treadle = outside(page);
  requestAnimationFrame(() => requestAnimationFrame(() => { window.treadle.firstPaint = performance.now(); }));
}

main();
