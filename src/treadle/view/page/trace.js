"use strict";

// A trace as the page reads it: columns over ops, inflated, and what follows from them. No drawing here.

const ARRAYS = { u1: Uint8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };
const SECONDS = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1 }; // of the units that are times; "unit" is none
const UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6]]; // that people read

async function inflate(column) {
  const text = atob(column.data);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const values = new ARRAYS[column.type](await new Response(stream).arrayBuffer());
  if (column.differences) for (let i = 1; i < values.length; i++) values[i] += values[i - 1];
  return values;
}

// The first index from `low` up to `high` at which a sorted array is above `value`.
function firstAbove(sorted, value, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

class Trace {
  static async load(shipped, kinds) {
    const names = Object.keys(shipped.columns);
    const arrays = await Promise.all(names.map((name) => inflate(shipped.columns[name])));
    return new Trace(shipped, kinds, Object.fromEntries(names.map((name, i) => [name, arrays[i]])));
  }

  constructor(shipped, kinds, columns) {
    const { kind, mb, chunk, layer, sizeBytes, joined, saves, dep, path } = columns;
    Object.assign(this, { kind, mb, chunk, layer, sizeBytes, joined, saves, dep, path, kinds });
    const { name, size, about, unit, ticks, makespan, twoWays, byLayer, isUpdate, lanes, totals, taken, given } = shipped;
    Object.assign(this, { name, size, about, unit, ticks, makespan, twoWays, byLayer, isUpdate, lanes, totals, taken, given });
    this.savedUnit = shipped.savedUnit;
    this.look = kind.map((each, op) => 2 * each + (chunk[op] > 0)); // a kind has one look in chunk 0, one in later ones
    this.pathSummary = shipped.path;
    this.numOps = kind.length;
    this.numRanks = totals.ranks.length;
    this.hasJoined = joined.includes(1);
    this.readTimes(columns.gap, columns.duration);
    this.depPtr = new Int32Array(this.numOps + 1);
    for (let op = 0; op < this.numOps; op++) this.depPtr[op + 1] = this.depPtr[op] + columns.numDeps[op];
    this.groups = new Map();
    lanes.group.forEach((group, lane) => {
      if (group < 0) return;
      if (!this.groups.has(group)) this.groups.set(group, []);
      this.groups.get(group).push(lane);
    });
    this.curves = new Map();
  }

  // `reach` is the latest end on the lane so far: sorted, even where measured ops of a lane overlap.
  readTimes(gap, duration) {
    this.start = new Float64Array(this.numOps);
    this.end = new Float64Array(this.numOps);
    this.reach = new Float64Array(this.numOps);
    this.laneOf = new Int32Array(this.numOps);
    this.laneTakesTime = this.lanes.rank.map(() => false);
    const { ptr } = this.lanes;
    for (let lane = 0; lane + 1 < ptr.length; lane++) {
      let end = 0, reach = 0;
      for (let op = ptr[lane]; op < ptr[lane + 1]; op++) {
        this.start[op] = end + gap[op];
        end = this.end[op] = this.start[op] + duration[op];
        reach = this.reach[op] = Math.max(reach, end);
        this.laneOf[op] = lane;
        if (duration[op] > 0) this.laneTakesTime[lane] = true;
      }
    }
  }

  rankOf(op) {
    return this.lanes.rank[this.laneOf[op]];
  }

  // As a person reads it: "attn_f 3.1 L0", "send F3.1 to rank 2".
  text(op) {
    const peer = this.lanes.peer[this.laneOf[op]];
    const numbers = { mb: this.mb[op], chunk: this.chunk[op], layer: this.layer[op], peer };
    return this.kinds[this.kind[op]].text.replace(/{(\w+)}/g, (_, name) => numbers[name]);
  }

  // The ops of a lane that start and end together with this one: [first, after the last).
  half(op) {
    const stop = this.lanes.ptr[this.laneOf[op] + 1];
    let first = op, after = op + 1;
    while (this.joined[first]) first--;
    while (after < stop && this.joined[after]) after++;
    return [first, after];
  }

  // The like ops on the other lanes of its group: the other end of a message, the other members of a collective.
  partners(op) {
    const lane = this.laneOf[op], { ptr, group } = this.lanes, place = op - ptr[lane];
    const others = (this.groups.get(group[lane]) ?? []).filter((other) => other !== lane);
    return others.map((other) => ptr[other] + place).filter((at, i) => at < ptr[others[i] + 1]);
  }

  // What can hold up an op by itself: the op before it on its lane, then its dependencies.
  *needs(op) {
    const [first, after] = this.half(op);
    if (first > this.lanes.ptr[this.laneOf[op]]) yield first - 1;
    for (let k = this.depPtr[first]; k < this.depPtr[after]; k++) if (this.dep[k] >= 0) yield this.dep[k];
  }

  waitsFor(op) {
    const [first, after] = this.half(op);
    const found = new Set([...this.needs(op), ...this.partners(op)]);
    for (let other = first; other < after; other++) if (other !== op) found.add(other);
    return [...found];
  }

  waitersOf(op) {
    const [first, after] = this.half(op);
    const found = new Set();
    if (after < this.lanes.ptr[this.laneOf[op] + 1]) found.add(after);
    for (let half = first; half < after; half++) {
      for (const reader of this.readersOf(half)) found.add(reader);
    }
    return [...found];
  }

  // The ops with a row that an op stands for: itself, or those that a message without one carries data from, or to.
  withRow(op, rowOf, forward) {
    if (rowOf.has(this.laneOf[op])) return [op];
    const found = new Set();
    for (const member of [op, ...this.partners(op)]) {
      for (const other of forward ? this.readersOf(member) : this.needs(member)) {
        if (rowOf.has(this.laneOf[other]) && this.laneOf[other] !== this.laneOf[member]) found.add(other);
      }
    }
    return [...found];
  }

  readersOf(op) {
    this.readers ??= this.invert();
    return this.readers.op.subarray(this.readers.ptr[op], this.readers.ptr[op + 1]);
  }

  // Of each op, the ops that depend on it. Made at the first click: the first paint does without.
  invert() {
    const ptr = new Int32Array(this.numOps + 2), op = new Int32Array(this.dep.length);
    for (const wanted of this.dep) if (wanted >= 0) ptr[wanted + 2]++;
    for (let i = 2; i < ptr.length; i++) ptr[i] += ptr[i - 1];
    for (let reader = 0; reader < this.numOps; reader++) {
      for (let k = this.depPtr[reader]; k < this.depPtr[reader + 1]; k++) {
        if (this.dep[k] >= 0) op[ptr[this.dep[k] + 1]++] = reader;
      }
    }
    return { ptr, op };
  }

  // What it waited for: of all that its start needs, its own and its partners', the one that ended last. -1 for none.
  // The same rule, and the same choice among equals, as the critical path's.
  cause(op) {
    const members = [op, ...this.partners(op)];
    const began = Math.max(...members.map((member) => this.start[member]));
    let cause = -1, ended = 0;
    for (const member of members) {
      for (const needed of this.needs(member)) {
        const end = Math.min(this.end[needed], began);
        if (cause < 0 || end > ended) [cause, ended] = [needed, end];
      }
    }
    return cause;
  }

  // What a rank holds over time, as steps: from time[i] on it holds held[i]. At equal times giving back comes first.
  memory(rank) {
    if (!this.curves.has(rank)) this.curves.set(rank, this.memoryCurve(rank));
    return this.curves.get(rank);
  }

  memoryCurve(rank) {
    const { ptr } = this.lanes, keys = [];
    const { taken, given, saves } = this;
    // Time, then giving before taking, then how much an op saves, packed into one number: numbers sort fast.
    const key = (time, takes, what) => (time * 2 + takes) * taken.length + what;
    this.lanes.rank.forEach((owner, lane) => {
      for (let op = ptr[lane]; owner === rank && op < ptr[lane + 1]; op++) {
        const what = saves[op];
        if (taken[what]) keys.push(key(this.start[op], 1, what));
        if (given[what]) keys.push(key(this.end[op], 0, what));
      }
    });
    const sorted = Float64Array.from(keys).sort();
    const time = new Float64Array(sorted.length), held = new Float64Array(sorted.length);
    let now = 0, peak = 0, peakTime = 0;
    sorted.forEach((packed, i) => {
      const what = packed % taken.length, rest = (packed - what) / taken.length, takes = rest % 2;
      now += takes ? taken[what] : -given[what];
      time[i] = (rest - takes) / 2;
      held[i] = now;
      if (now > peak) [peak, peakTime] = [now, time[i]];
    });
    return { time, held, peak, peakTime };
  }

  // A time in the clock's unit, whole where it is whole.
  exactTime(ticks) {
    const places = this.unit in SECONDS ? Math.ceil(Math.log10(this.ticks)) : 3;
    const value = (ticks / this.ticks).toLocaleString("en", { maximumFractionDigits: places });
    return this.unit === "unit" ? value : `${value} ${this.unit}`;
  }

  // A time in four digits and the unit that suits it.
  shortTime(ticks) {
    const value = ticks / this.ticks, seconds = value * SECONDS[this.unit];
    if (!(this.unit in SECONDS)) return digits(value);
    const [unit, size] = UNITS.find(([, size]) => seconds >= size) ?? UNITS.at(-1);
    return `${digits(seconds / size)} ${unit}`;
  }
}

function digits(value) {
  return String(Number(value.toPrecision(4)));
}

// Counts stay counts: at the grain of cells what a rank holds is a number of activations.
function bytesText(size) {
  const [unit, scale] = [[" GB", 1e9], [" MB", 1e6], [" kB", 1e3]].find(([, scale]) => size >= scale) ?? ["", 1];
  return digits(size / scale) + unit;
}
