/* Draws the charts of a report from its data; those of one group share their axes and their cursor. */
"use strict";
(() => {
  const { el, number, chart } = Yard;
  const KINDS = { line: "line", dashed: "dash", area: "area", dots: "dots", bars: "points", steps: "steps" };
  const charts = JSON.parse(document.getElementById("data").textContent).charts;

  /* x must rise strictly, as several points of one x would become one. */
  function rising(x, log) {
    const last = x.length ? Math.abs(x[x.length - 1]) || 1 : 1;
    const step = last * 1e-9;
    for (let place = 1; place < x.length; place++) if (x[place] <= x[place - 1]) x[place] = log ? x[place - 1] * (1 + 1e-9) : x[place - 1] + step;
    return x;
  }
  function sorted(one, log) {
    const order = one.x.map((_, place) => place).sort((a, b) => one.x[a] - one.x[b]);
    return [rising(order.map((place) => one.x[place]), log), order.map((place) => one.y[place])];
  }
  function extent(found, read) {
    let low = Infinity, high = -Infinity;
    for (const one of found) for (const series of one.series) for (const value of read(series)) { if (value < low) low = value; if (value > high) high = value; }
    return low <= high ? [low, high] : null;
  }
  function yRange(found) {
    const range = extent(found, (series) => series.y);
    if (!range || found[0].y.log) return undefined;
    let [low, high] = range;
    if (found.some((one) => one.y.zero)) low = Math.min(0, low);
    const air = 0.05 * (high - low || Math.abs(high) || 1);
    return [low === 0 ? 0 : low - air, high + air];
  }
  function logRange(found, read) {
    const range = extent(found, read);
    if (!range) return undefined;
    return [range[0] / 1.15, Math.max(range[1] * 1.15, range[0] * 1.4)];
  }

  /* The places whose names have room below a chart in `host`; 70 pixels are the axis on its left. */
  function withRoom(names, host) {
    const room = Math.max(host.clientWidth - 70, 200);
    const apart = Math.ceil((names.join("").length * 6 + names.length * 6) / room);
    return names.map((_, place) => place).filter((place) => place % apart === 0);
  }
  function draw(spec, host) {
    const found = spec.group ? charts.filter((one) => one.group === spec.group) : [spec];
    const shown = spec.series.filter((one) => one.x.length);
    if (!shown.length) { host.append(el("p", { class: "empty", text: spec.empty })); return; }
    const tables = spec.series.map((one) => sorted(one, spec.x.log));
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const names = spec.names, all = spec.x.log ? logRange(found, (one) => one.x) : extent(found, (one) => one.x);
    const air = names.length ? 0.3 : 0;
    const whole = [all[0] - air, all[1] + air + (all[0] === all[1] ? 1 : 0)];
    const y = spec.y.log ? logRange(found, (one) => one.y) : yRange(found);
    chart(host, {
      height: 250, zoom: true, toggle: true, gridX: true, sync: spec.group || undefined,
      x: { log: spec.x.log, label: spec.x.label, range: undefined, whole, ticks: names.length ? withRoom(names, host) : undefined, format: names.length ? (value) => names[value] ?? "" : (value) => number(value, 4) },
      y: { log: spec.y.log, label: spec.y.label, range: y ? () => y : undefined, format: (value) => number(value, 4) },
      series: spec.series.map((one) => ({ label: one.label, color: one.color, kind: one.x.length === 1 && one.kind === "line" ? "points" : KINDS[one.kind], spanGaps: one.kind !== "dots" })),
    }).set(data);
  }

  Yard.initTheme(document.getElementById("theme"));
  /* Only what comes near the window is drawn, so that a long report opens at once. */
  const waiting = new Set(document.querySelectorAll("[data-chart]"));
  const watcher = new IntersectionObserver((entries) => entries.filter((one) => one.isIntersecting).forEach((one) => show(one.target)), { rootMargin: "400px" });
  function show(host) {
    if (!waiting.delete(host)) return;
    watcher.unobserve(host);
    draw(charts[Number(host.dataset.chart)], host);
  }
  for (const host of waiting) watcher.observe(host);
  window.addEventListener("beforeprint", () => [...waiting].forEach(show));
})();
