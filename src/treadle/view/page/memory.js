// What ranks hold: the chosen one filled, the others as thin lines over it. In each pixel the most it holds there.
class MemoryPainter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
  }

  draw(traces, view, chosen) {
    const { context, canvas } = this, ratio = fitCanvas(canvas);
    const width = canvas.width / ratio, height = canvas.height / ratio / traces.length;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, canvas.height / ratio);
    this.most = Math.max(1, ...traces.flatMap((trace) => trace.totals.ranks.map((rank) => rank.peak)));
    traces.forEach((trace, i) => this.drawTrace(trace, view, chosen[i], i * height, width, height));
  }

  drawTrace(trace, view, rank, top, width, height) {
    const bottom = top + height - 8, room = height - 18;
    const y = (held) => bottom - (held / this.most) * room;
    this.context.fillStyle = "#b4c8ea";
    this.trail(trace, rank, view, width, y, true);
    this.context.strokeStyle = "rgba(70, 80, 100, .3)";
    this.context.lineWidth = 1;
    const shown = Math.min(trace.numRanks, 16); // more thin lines than that say nothing
    for (let other = 0; other < shown; other++) if (other !== rank) this.trail(trace, other, view, width, y, false);
    this.drawText(trace, rank, top, width, bottom);
  }

  trail(trace, rank, view, width, y, filled) {
    const { context } = this, { time, held } = trace.memory(rank), pixels = Math.ceil(width - GUTTER);
    const step = (view.to - view.from) / pixels;
    let next = firstAbove(time, view.from, 0, time.length), now = next > 0 ? held[next - 1] : 0;
    context.beginPath();
    if (filled) context.moveTo(GUTTER, y(0));
    let drawn = null;
    for (let x = 0; x < pixels; x++) {
      let most = now;
      for (const to = view.from + (x + 1) * step; next < time.length && time[next] < to; next++) {
        now = held[next];
        if (now > most) most = now;
      }
      if (most === drawn) continue;
      if (drawn !== null) context.lineTo(GUTTER + x, y(drawn));
      context.lineTo(GUTTER + x, y(most));
      drawn = most;
    }
    context.lineTo(width, y(drawn));
    if (!filled) return context.stroke();
    context.lineTo(width, y(0));
    return context.fill();
  }

  drawText(trace, rank, top, width, bottom) {
    const { context } = this, { peak, peakTime } = trace.memory(rank);
    context.fillStyle = "#fff";
    context.fillRect(0, top, GUTTER, bottom + 8 - top);
    context.fillStyle = LINE;
    context.fillRect(GUTTER, bottom, width - GUTTER, 1);
    context.textBaseline = "top";
    const say = (text, x, y, align, colour, font) => {
      Object.assign(context, { textAlign: align, fillStyle: colour, font: `${font} ${FONT}` });
      context.fillText(text, x, y);
    };
    say("activations", 16, top + 8, "left", INK, "600 12px");
    say(`rank ${rank}`, GUTTER - 8, top + 9, "right", SOFT, "11px");
    if (peak === 0) return say("nothing is saved", 16, top + 24, "left", SOFT, "11px");
    say(`peak ${bytesText(peak)}${trace.savedUnit}`, 16, top + 24, "left", SOFT, "11px");
    return say(`at ${trace.shortTime(peakTime)}`, 16, top + 38, "left", SOFT, "11px");
  }
}
