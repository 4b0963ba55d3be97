"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("timeline"), hover = document.getElementById("hover");
  const ROW = 14, SHARES = 34, GAP = 22;
  let from = 0, to = Math.max(data.span, 1);
  let y = 0;
  for (const lane of data.lanes) {
    for (const label in lane.shares) lane.shares[label] = Uint8Array.from(atob(lane.shares[label]), c => c.charCodeAt(0));
    lane.rows = lane.slices.reduce((most, slice) => Math.max(most, slice[2] + 1), 0);
    lane.top = y;
    y += GAP + lane.rows * ROW + SHARES;
  }
  const height = Math.max(y, 20);
  const time = ns => ns >= 1e9 ? (ns / 1e9).toPrecision(4) + " s" : ns >= 1e6 ? (ns / 1e6).toPrecision(4) + " ms" : (ns / 1e3).toPrecision(4) + " us";
  const colour = text => {  // of an operation, by its name
    let hash = 0;
    for (const char of text) hash = (hash * 31 + char.codePointAt(0)) >>> 0;
    return `hsl(${hash % 360} 45% 78%)`;
  };

  function draw() {
    const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = width * scale; canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale); context.font = "11px sans-serif";
    const x = ns => (ns - from) / (to - from) * width;
    for (const lane of data.lanes) {
      context.fillStyle = "#222";
      context.fillText(lane.name, 4, lane.top + 15);
      for (const [start, end, depth, name] of lane.slices) {
        if (end < from || start > to) continue;
        const left = Math.max(x(start), 0), size = Math.max(Math.min(x(end), width) - left, 0.5), top = lane.top + GAP + depth * ROW;
        context.fillStyle = colour(lane.names[name]);
        context.fillRect(left, top, size, ROW - 1);
        if (size > 30) {
          context.save(); context.beginPath(); context.rect(left, top, size, ROW); context.clip();
          context.fillStyle = "#222"; context.fillText(lane.names[name], left + 3, top + 10);
          context.restore();
        }
      }
      const labels = Object.keys(lane.shares), base = lane.top + GAP + lane.rows * ROW + SHARES;
      const bins = labels.length ? lane.shares[labels[0]].length : 0;
      for (let pixel = 0; pixel < width && bins; pixel++) {
        const first = Math.floor((from + (to - from) * pixel / width) / data.span * bins);
        const last = Math.min(bins, Math.max(first + 1, Math.floor((from + (to - from) * (pixel + 1) / width) / data.span * bins)));
        let floor = base;
        for (const label of labels) {
          let sum = 0;
          for (let bin = first; bin < last; bin++) sum += lane.shares[label][bin];
          const size = sum / (last - first) / 255 * (SHARES - 2);
          context.fillStyle = data.colours[label];
          context.fillRect(pixel, floor - size, 1, size);
          floor -= size;
        }
      }
    }
  }

  function describe(event) {
    const box = canvas.getBoundingClientRect(), ns = from + (event.clientX - box.left) / box.width * (to - from);
    const row = event.clientY - box.top, lane = data.lanes.findLast(each => each.top <= row);
    if (!lane) return;
    const inside = lane.slices.filter(each => each[0] <= ns && ns < each[1]).map(each => `${lane.names[each[3]]} (${time(each[1] - each[0])})`);
    const shares = Object.entries(lane.shares).map(([label, bins]) => [label, bins[Math.min(bins.length - 1, Math.floor(ns / data.span * bins.length))] / 2.55]);
    const text = shares.filter(each => each[1] >= 0.5).map(each => `${each[0].replace("_", " ")} ${each[1].toFixed(0)} %`);
    hover.textContent = `${time(ns)}  ${lane.name}: ${inside.join(" > ")}  ${text.join(", ")}`;
  }

  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), middle = from + (event.clientX - box.left) / box.width * (to - from);
    const factor = Math.exp(event.deltaY / 400), size = Math.min(Math.max((to - from) * factor, 1000), data.span);
    from = Math.min(Math.max(middle - (middle - from) * size / (to - from), 0), data.span - size);
    to = from + size;
    draw();
  }, { passive: false });
  canvas.addEventListener("pointermove", event => {
    if (event.buttons & 1) {
      const moved = Math.min(Math.max(-event.movementX / canvas.clientWidth * (to - from), -from), data.span - to);
      from += moved; to += moved;
      draw();
    }
    describe(event);
  });
  canvas.addEventListener("dblclick", () => { from = 0; to = Math.max(data.span, 1); draw(); });
  window.addEventListener("resize", draw);
  draw();
})();
