// Drawing: boxes are written into pixels, text goes on top. A row of many thousand ops costs an addition or two for
// each, and a copy of a line of pixels; canvas rectangles would cost ten times that.

const GUTTER = 148; // for the names of ranks and lanes
const AXIS = 26; // for the times
const HEADING = 22; // for the name of each of two traces
const TIME_WIDTH = 110; // for each of them
const RANK_GAP = 7;
const FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif";
const PAPER = [255, 255, 255];
const LANE = [245, 245, 242];
const INK = "#1d1f23", SOFT = "#6b6f76", LINE = "#e3e3e0";
const OUTLINES = { selected: [0, 0, 0], waits: [31, 95, 208], waiters: [176, 69, 156], path: [60, 60, 60] };
const FADED = 0.2; // what stays of a colour when something else is lit up
const FAINTEST = 0.3; // of its colour: short messages stay in sight however many fall into a pixel
const SMALLEST_LABEL = 13; // pixels
const MOST_ARROWS = 400; // drawn at once

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function packed([red, green, blue]) {
  return (255 << 24) | (blue << 16) | (green << 8) | red;
}

// A canvas as large as it is shown, in the pixels of the screen.
function fitCanvas(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  return ratio;
}

// One trace's part of the plot: where its rows are, in CSS pixels from the top of its content.
class Pane {
  constructor(trace, index, top, height, folded) {
    Object.assign(this, { trace, index, top, height });
    this.rows = [];
    this.rowOf = new Map();
    this.layOut(folded);
  }

  layOut(folded) {
    const ranks = this.lanesByRank(folded), { compute } = this.trace.lanes;
    const natural = (lane) => (compute[lane] ? (this.trace.hasJoined ? 26 : 20) : 12);
    const wanted = ranks.flat().reduce((sum, lane) => sum + natural(lane), 0);
    const fitting = (this.height - 4 - ranks.length * RANK_GAP) / Math.max(1, wanted);
    const scale = fitting < 0.8 ? 1 : Math.min(1.7, fitting); // what does not fit anyway need not be cramped
    let y = 4;
    ranks.forEach((mine, rank) => {
      mine.forEach((lane, i) => {
        const height = Math.floor(natural(lane) * scale);
        this.rowOf.set(lane, this.rows.length);
        this.rows.push({ lane, rank, y, height, opens: i === 0 });
        y += height;
      });
      y += mine.length ? RANK_GAP : 0;
    });
    this.content = y;
  }

  // Lanes on which nothing takes time, such as messages that cost nothing, have no row: it would be empty.
  lanesByRank(folded) {
    const { rank, compute } = this.trace.lanes;
    const ranks = Array.from({ length: this.trace.numRanks }, () => []);
    rank.forEach((owner, lane) => {
      if (this.trace.laneTakesTime[lane] && (compute[lane] || !folded.has(owner))) ranks[owner].push(lane);
    });
    ranks.forEach((lanes) => lanes.sort((a, b) => compute[b] - compute[a] || a - b));
    return ranks;
  }
}

class Painter {
  constructor(canvas, kinds, roles) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.kinds = kinds;
    this.looks = kinds.flatMap((kind) => roles[kind.role].looks);
    this.red = Float32Array.from(this.looks, (look) => rgb(look.fill)[0]);
    this.green = Float32Array.from(this.looks, (look) => rgb(look.fill)[1]);
    this.blue = Float32Array.from(this.looks, (look) => rgb(look.fill)[2]);
    this.widths = new Map();
  }

  // The pixels of the plot without gutter and axis; made anew only where the size changed.
  prepare() {
    const ratio = (this.ratio = fitCanvas(this.canvas));
    this.left = Math.round(GUTTER * ratio);
    this.top = Math.round(AXIS * ratio);
    const width = Math.max(1, this.canvas.width - this.left), height = Math.max(1, this.canvas.height - this.top);
    if (this.image?.width === width && this.image.height === height) return;
    this.image = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.mix = new Float32Array(4 * (width + 1));
    this.opening = new Uint8Array(width + 1);
    this.line = new Uint32Array(width);
  }

  // `view`: from, to in ticks, and scroll; `lit`: null or, for each trace, a map from ops to names of OUTLINES;
  // `links`: for each trace, arrows between ops: [from, to, a name of OUTLINES].
  draw(panes, view, lit, links) {
    this.prepare();
    this.from = view.from;
    this.scale = this.image.width / (view.to - view.from);
    this.labels = [];
    this.pixels.fill(packed(PAPER));
    for (const pane of panes) {
      for (const row of this.visibleRows(pane, view.scroll)) this.drawRow(pane, row, view.to, lit !== null);
      if (lit !== null) this.drawLit(pane, view.scroll, lit[pane.index]);
    }
    this.context.putImageData(this.image, this.left, this.top);
    this.drawLabels(lit);
    if (lit !== null) for (const pane of panes) this.drawArrows(pane, view.scroll, links[pane.index]);
    this.drawFrame(panes, view);
  }

  *visibleRows(pane, scroll) {
    for (const row of pane.rows) {
      const shown = this.rowPixels(pane, row, scroll);
      if (shown !== null) yield { ...row, ...shown };
    }
  }

  // Where a row is among the pixels, cut to its pane: [above, below).
  rowPixels(pane, row, scroll) {
    const y = pane.top - AXIS + row.y - scroll, bottom = pane.top - AXIS + pane.height;
    const above = Math.max(pane.top - AXIS, y), below = Math.min(bottom, y + row.height - 1);
    if (below <= above) return null;
    return { above: Math.round(above * this.ratio), below: Math.round(below * this.ratio) };
  }

  drawRow(pane, row, to, faded) {
    const middle = (row.above + row.below) >> 1;
    if (pane.trace.hasJoined && pane.trace.lanes.compute[row.lane]) {
      this.drawLine(pane, row, to, faded, row.above, middle, 0);
      this.drawLine(pane, row, to, faded, middle, row.below, 1);
    } else {
      this.drawLine(pane, row, to, faded, row.above, row.below, -1);
    }
  }

  // Ops add their colour to each pixel by the share of it they cover, so that where many fall into one pixel it shows
  // their mixture, and idle time as lighter. `half` 0 leaves out second halves of joined ops, 1 leaves out first ones.
  drawLine(pane, row, to, faded, above, below, half) {
    const { trace } = pane, { start, end, reach, look, joined } = trace;
    const { mix, opening, scale, from } = this, width = this.image.width;
    const stop = trace.lanes.ptr[row.lane + 1], hatched = [];
    mix.fill(0);
    opening.fill(0);
    for (let op = firstAbove(reach, from, trace.lanes.ptr[row.lane], stop); op < stop && start[op] < to; op++) {
      if (half === 0 && joined[op]) continue;
      if (half === 1 && op + 1 < stop && joined[op + 1]) continue;
      const begin = (start[op] - from) * scale, finish = (end[op] - from) * scale;
      if (finish <= 0) continue;
      const x0 = begin > 0 ? begin : 0, x1 = finish < width ? finish : width;
      const first = x0 | 0, last = x1 | 0, k = look[op];
      if (first === last) {
        this.add(first, x1 - x0, k);
        continue;
      }
      this.add(first, first + 1 - x0, k);
      for (let x = first + 1; x < last; x++) this.add(x, 1, k);
      this.add(last, x1 - last, k);
      if (finish - begin >= 4 && begin > 0) opening[first] = 1;
      if (last - first >= 6 && this.looks[k].hatch) hatched.push({ x0: first + 1, x1: last, above, below, look: k });
      if (x1 - x0 < SMALLEST_LABEL * this.ratio) continue;
      const whole = half < 0 || !(joined[op] || (op + 1 < stop && joined[op + 1]));
      if (!whole) this.labels.push({ pane, op, x0, x1, above, below });
      else if (half !== 1) this.labels.push({ pane, op, x0, x1, above: row.above, below: row.below });
    }
    this.mixLine(faded, trace.lanes.compute[row.lane] ? 0 : FAINTEST);
    for (let y = above; y < below; y++) this.pixels.set(this.line, y * width);
    for (const box of hatched) this.hatch(box, faded);
  }

  // Thin lines or dots, a little darker than the fill: roles that meet stay apart without colour too.
  hatch({ x0, x1, above, below, look }, faded) {
    const { pixels, looks } = this, { width } = this.image, gap = Math.round(6 * this.ratio), keep = faded ? FADED : 1;
    const ink = [this.red, this.green, this.blue].map((part, i) => 0.8 * part[look] * keep + LANE[i] * (1 - keep));
    const colour = packed(ink), slope = { "/": 1, "\\": -1 }[looks[look].hatch] ?? 0;
    for (let y = above; y < below; y++) {
      if (slope === 0 && y % 3) continue; // dots
      const phase = (((-slope * y - x0) % gap) + gap) % gap;
      for (let x = x0 + phase; x < x1; x += gap) pixels[y * width + x] = colour;
    }
  }

  add(x, share, look) {
    const { mix } = this;
    mix[4 * x] += share * this.red[look];
    mix[4 * x + 1] += share * this.green[look];
    mix[4 * x + 2] += share * this.blue[look];
    mix[4 * x + 3] += share;
  }

  mixLine(faded, faintest) {
    const { mix, opening, line } = this, empty = packed(LANE), keep = faded ? FADED : 1;
    for (let x = 0; x < line.length; x++) {
      const covered = mix[4 * x + 3];
      if (covered < 0.001) {
        line[x] = empty;
        continue;
      }
      // Ops of a measured lane may overlap: then they share the pixel. A box begins with a light seam.
      const shown = Math.min(1, Math.max(faintest, covered)) * keep * (opening[x] ? 0.45 : 1);
      const strength = shown / covered, rest = 1 - shown;
      const red = mix[4 * x] * strength + LANE[0] * rest;
      const green = mix[4 * x + 1] * strength + LANE[1] * rest;
      const blue = mix[4 * x + 2] * strength + LANE[2] * rest;
      line[x] = (255 << 24) | (blue << 16) | (green << 8) | red;
    }
  }

  // What is lit up, in full colour and never thinner than two pixels, with an outline that says why.
  drawLit(pane, scroll, ops) {
    const { trace } = pane, painted = new Int32Array(trace.lanes.rank.length).fill(-1);
    for (const [op, why] of ops) {
      const last = ((trace.end[op] - this.from) * this.scale) | 0, lane = trace.laneOf[op];
      if (why === "path" && last === painted[lane]) continue; // of a long path many ops fall into one pixel
      painted[lane] = last;
      const box = this.box(pane, op, scroll);
      if (box === null) continue;
      const k = trace.look[op], wide = box.x1 - box.x0 >= 5 && box.below - box.above >= 5;
      this.fill(box, packed([this.red[k], this.green[k], this.blue[k]]));
      if (wide || why === "selected") this.outline(box, packed(OUTLINES[why]), why === "path" ? 1 : 2);
    }
  }

  // An op's pixels in the plot, or null where it is folded away or out of sight.
  box(pane, op, scroll) {
    const { trace } = pane, row = pane.rows[pane.rowOf.get(trace.laneOf[op])];
    const shown = row === undefined ? null : this.rowPixels(pane, row, scroll);
    if (shown === null) return null;
    let x0 = Math.round((trace.start[op] - this.from) * this.scale);
    let x1 = Math.max(x0 + 2, Math.round((trace.end[op] - this.from) * this.scale));
    if (x1 <= 0 || x0 >= this.image.width) return null;
    [x0, x1] = [Math.max(0, x0), Math.min(this.image.width, x1)];
    const [first, after] = trace.half(op), middle = (shown.above + shown.below) >> 1;
    if (after - first < 2) return { x0, x1, above: shown.above, below: shown.below };
    return op === first ? { x0, x1, above: shown.above, below: middle } : { x0, x1, above: middle, below: shown.below };
  }

  // From the end of one op to the start of another; those that would be too many to tell apart are left out.
  drawArrows(pane, scroll, links) {
    const { context, ratio } = this, { width, height } = this.image;
    context.save();
    context.beginPath();
    context.rect(this.left, this.top + (pane.top - AXIS) * ratio, width, pane.height * ratio);
    context.clip();
    context.lineWidth = 1.4 * ratio;
    let drawn = 0;
    for (const [from, to, why] of links) {
      const start = this.anchor(pane, from, scroll, true), stop = this.anchor(pane, to, scroll, false);
      if (start === null || stop === null || Math.max(start.x, stop.x) < 0 || Math.min(start.x, stop.x) > width) continue;
      if (++drawn > MOST_ARROWS) break;
      this.drawArrow(start, stop, `rgb(${OUTLINES[why].join()})`, Math.min(height, 26 * ratio));
    }
    context.restore();
  }

  // The middle of an op's end or start, wherever that is along its row; null where the row is out of sight.
  anchor(pane, op, scroll, atEnd) {
    const { trace } = pane, row = pane.rows[pane.rowOf.get(trace.laneOf[op])];
    const shown = row === undefined ? null : this.rowPixels(pane, row, scroll);
    if (shown === null) return null;
    const x = ((atEnd ? trace.end : trace.start)[op] - this.from) * this.scale, [first, after] = trace.half(op);
    const share = after - first < 2 ? 0.5 : op === first ? 0.25 : 0.75;
    return { x, y: shown.above + share * (shown.below - shown.above) };
  }

  drawArrow(start, stop, colour, bow) {
    const { context, ratio } = this, [x0, y0, x1, y1] = [start.x, start.y, stop.x, stop.y];
    const head = 5 * ratio, pull = Math.max(8 * ratio, Math.min(bow, Math.abs(x1 - x0) / 2 + Math.abs(y1 - y0) / 4));
    context.strokeStyle = context.fillStyle = colour;
    context.beginPath();
    context.moveTo(this.left + x0, this.top + y0);
    const [cx0, cx1] = [this.left + x0 + pull, this.left + x1 - pull];
    context.bezierCurveTo(cx0, this.top + y0, cx1, this.top + y1, this.left + x1 - head, this.top + y1);
    context.stroke();
    context.beginPath();
    context.moveTo(this.left + x1, this.top + y1);
    context.lineTo(this.left + x1 - head, this.top + y1 - 0.6 * head);
    context.lineTo(this.left + x1 - head, this.top + y1 + 0.6 * head);
    context.fill();
  }

  fill({ x0, x1, above, below }, colour) {
    const { width } = this.image;
    for (let y = above; y < below; y++) this.pixels.fill(colour, y * width + x0, y * width + x1);
  }

  outline({ x0, x1, above, below }, colour, thick) {
    this.fill({ x0, x1, above, below: Math.min(below, above + thick) }, colour);
    this.fill({ x0, x1, above: Math.max(above, below - thick), below }, colour);
    this.fill({ x0, x1: Math.min(x1, x0 + thick), above, below }, colour);
    this.fill({ x0: Math.max(x0, x1 - thick), x1, above, below }, colour);
  }

  drawLabels(lit) {
    const { context, ratio } = this;
    let size = 0;
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    for (const { pane, op, x0, x1, above, below } of this.labels) {
      const { trace } = pane;
      const wanted = Math.min(10, (below - above) / ratio) * ratio;
      if (wanted < 8 * ratio) continue;
      if (wanted !== size) context.font = `${(size = wanted)}px ${FONT}`;
      const text = this.labelThatFits(trace, op, ((x1 - x0 - 4 * ratio) * 10 * ratio) / size);
      if (text === "") continue;
      const faded = lit !== null && !lit[pane.index].has(op);
      context.fillStyle = faded ? "#b9b9b6" : this.looks[trace.look[op]].text;
      context.fillText(text, this.left + (x0 + x1) / 2, this.top + (above + below) / 2 + 0.36 * size);
    }
  }

  labelThatFits(trace, op, room) {
    const { short } = this.kinds[trace.kind[op]], mb = trace.mb[op];
    if (mb < 0) return this.width(short) <= room ? short : "";
    if (trace.isUpdate) {
      const part = `${mb}.${trace.layer[op]}`;
      return [`${short} ${part}`, part].find((text) => this.width(text) <= room) ?? "";
    }
    const part = `${mb}.${trace.chunk[op]}`;
    const choices = trace.byLayer ? [`${short} ${part} L${trace.layer[op]}`, `${short} ${part}`] : [`${short}${part}`];
    return [...choices, String(mb)].find((text) => this.width(text) <= room) ?? "";
  }

  // Of a text at its full size. Digits are about equally wide, so that few texts are ever measured.
  width(text) {
    const key = text.replace(/\d/g, "0") + this.ratio;
    if (!this.widths.has(key)) {
      const { font } = this.context;
      this.context.font = `${10 * this.ratio}px ${FONT}`;
      this.widths.set(key, this.context.measureText(text).width);
      this.context.font = font;
    }
    return this.widths.get(key);
  }

  // Names on the left, times on top, and what keeps panes apart.
  drawFrame(panes, view) {
    const { context, canvas, ratio } = this;
    context.save();
    context.scale(ratio, ratio);
    const width = canvas.width / ratio, height = canvas.height / ratio;
    context.fillStyle = "#fff";
    context.fillRect(0, 0, GUTTER, height);
    context.fillRect(0, 0, width, AXIS);
    for (const pane of panes) this.drawNames(pane, view, panes.length > 1, width);
    this.drawTimes(panes[0].trace, view, width);
    context.restore();
  }

  drawNames(pane, view, named, width) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(0, pane.top, GUTTER, pane.height);
    context.clip();
    context.textBaseline = "middle";
    for (const row of pane.rows) {
      const y = pane.top + row.y - view.scroll + row.height / 2;
      if (y < pane.top - 20 || y > pane.top + pane.height + 20) continue;
      if (row.opens) this.drawRankName(row, y, view.folded.has(row.rank));
      if (row.height < 9 || pane.trace.lanes.compute[row.lane]) continue;
      context.font = `${Math.min(11, row.height - 1)}px ${FONT}`;
      context.fillStyle = SOFT;
      context.textAlign = "right";
      context.fillText(pane.trace.lanes.name[row.lane], GUTTER - 8, y);
    }
    context.restore();
    this.drawScrollbar(pane, view.scroll, width);
    if (named) this.drawHeading(pane, width);
  }

  drawRankName(row, y, folded) {
    const { context } = this;
    context.font = `600 12px ${FONT}`;
    context.textAlign = "left";
    context.fillStyle = INK;
    context.fillText(`rank ${row.rank}`, 30, y);
    context.fillStyle = SOFT;
    context.beginPath();
    if (folded) [[18, -4], [18, 4], [23, 0]].forEach(([dx, dy]) => context.lineTo(dx, y + dy));
    else [[16, -2.5], [24, -2.5], [20, 2.5]].forEach(([dx, dy]) => context.lineTo(dx, y + dy));
    context.fill();
  }

  drawHeading(pane, width) {
    const { context } = this, y = pane.top - HEADING;
    context.fillStyle = "#fff";
    context.fillRect(0, y, width, HEADING);
    context.fillStyle = LINE;
    context.fillRect(0, y, width, 1);
    context.font = `600 12px ${FONT}`;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = INK;
    context.fillText(pane.trace.name, 16, y + HEADING / 2 + 1);
  }

  drawScrollbar(pane, scroll, width) {
    if (pane.content <= pane.height) return;
    const share = pane.height / pane.content;
    this.context.fillStyle = "rgba(0, 0, 0, .25)";
    this.context.fillRect(width - 6, pane.top + scroll * share, 4, pane.height * share);
  }

  drawTimes(trace, view, width) {
    const { context } = this, most = (width - GUTTER) / TIME_WIDTH;
    const step = niceStep((view.to - view.from) / trace.ticks / most) * trace.ticks;
    context.fillStyle = LINE;
    context.fillRect(0, AXIS - 1, width, 1);
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const scale = this.scale / this.ratio;
    for (let n = Math.ceil(view.from / step); n * step <= view.to; n++) {
      const x = GUTTER + (n * step - view.from) * scale;
      context.fillStyle = "#b5b5b0";
      context.fillRect(Math.round(x), AXIS - 6, 1, 5);
      context.fillStyle = SOFT;
      const text = axisTime(trace, n * step, step);
      if (x + context.measureText(text).width / 2 < width) context.fillText(text, x, AXIS / 2 - 2);
    }
  }
}

// 1, 2 or 5 times a power of ten, not below the least.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((factor) => factor * power >= least) ?? 10);
}

// A time on the axis: all in one unit, chosen by the step, and with the digits that tell neighbours apart.
function axisTime(trace, ticks, step) {
  const seconds = SECONDS[trace.unit], scale = (seconds ?? 1) / trace.ticks;
  const suits = ([, size]) => step * scale >= size / 10.01;
  const [unit, size] = seconds === undefined ? ["", 1] : UNITS.find(suits) ?? UNITS.at(-1);
  const places = Math.max(0, -Math.floor(Math.log10((step * scale) / size) + 1e-9));
  const value = (ticks * scale) / size || 0; // not -0
  const text = value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  return unit ? `${text} ${unit}` : text;
}
