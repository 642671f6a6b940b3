/* What all pages share: the theme, numbers as text, and curves drawn by uPlot. Text reaches the page by textContent. */
"use strict";
const Yard = (() => {
  const root = document.documentElement;
  const charts = new Set();
  let palette = null;

  /* ---- theme ---- */
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : media.matches);
  const remembered = (key, value) => {
    try {
      if (value === undefined) return localStorage.getItem(key);
      localStorage.setItem(key, value);
    } catch { /* pages opened from a file may have no storage */ }
    return null;
  };
  const redraw = () => { palette = null; charts.forEach((chart) => chart.redraw()); };
  function initTheme(button) {
    const saved = remembered("tokenyard.theme");
    if (saved === "dark" || saved === "light") root.dataset.theme = saved;
    const show = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`); };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      remembered("tokenyard.theme", root.dataset.theme);
      show(); redraw();
    });
    media.addEventListener("change", () => { show(); redraw(); });
    show();
  }
  function color(name) {
    if (!palette) palette = {};
    if (!(name in palette)) palette[name] = getComputedStyle(root).getPropertyValue(`--${name}`).trim() || name;
    return palette[name];
  }
  const slot = (place) => (place >= 0 && place < 16 ? `s${place + 1}` : "other");
  function fade(name, share) {
    const hex = color(name);
    const at = (place) => parseInt(hex.slice(place, place + 2), 16);
    return hex.length === 7 ? `rgba(${at(1)},${at(3)},${at(5)},${share})` : hex;
  }

  /* ---- the document ---- */
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "text") node.textContent = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  function key(name, kind) {
    const thin = kind === "line" || kind === "dash";
    const mark = el("i", { class: `key ${thin ? kind : ""}`, "aria-hidden": "true" });
    mark.style[thin ? "borderColor" : "background"] = `var(--${name})`;
    return mark;
  }

  /* ---- numbers ---- */
  function number(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= limit) return `${trim(value / (unit === "k" ? 1e3 : limit), digits)}${unit}`;
    }
    return size >= 1000 ? Math.round(value).toLocaleString("en") : trim(value, digits);
  }
  const trim = (value, digits) => String(Number(value.toPrecision(digits)));
  function percent(share) {
    if (share === null || share === undefined || Number.isNaN(share)) return "–";
    if (share < 5e-4) return "0 %";
    const text = trim(100 * share, share >= 0.9995 ? 4 : 3);
    // Only the whole is 100 %.
    return `${share < 1 && text === "100" ? "99.99" : text} %`;
  }
  function duration(ms) {
    if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
    if (ms < 1000) return `${trim(ms, ms < 1 ? 2 : 3)} ms`;
    if (ms < 120000) return `${trim(ms / 1000, 3)} s`;
    return ms < 7.2e6 ? `${Math.round(ms / 60000)} min` : `${trim(ms / 3.6e6, 3)} h`;
  }

  /* ---- curves ----
     spec: {height, x: {range, format, log, label}, y: {format, log, from, label}, stacked, zoom, sync,
            series: [{label, color, kind: line|area|dash|dots|bars, width}]} */
  function chart(host, spec) {
    const format = (spec.y && spec.y.format) || ((value) => number(value));
    const formatX = (spec.x && spec.x.format) || ((value) => number(value));
    const legend = el("div", { class: "legend" });
    const plot = el("div", { class: "plot" });
    host.append(legend, plot);
    const values = spec.series.map((one, place) => {
      const value = el("b", {});
      const item = spec.toggle
        ? el("button", { type: "button", "aria-pressed": "true" }, key(one.color, spec.stacked ? "area" : one.kind || "line"), el("span", { text: one.label }), value)
        : el("span", {}, key(one.color, spec.stacked ? "area" : one.kind || "line"), el("span", { text: one.label }), value);
      if (spec.toggle) item.addEventListener("click", () => {
        const shown = item.getAttribute("aria-pressed") !== "true";
        item.setAttribute("aria-pressed", String(shown));
        u.setSeries(order(place) + 1, { show: shown });
      });
      if (one.label) legend.append(item);
      return value;
    });
    /* Stacked areas are drawn from the top of the stack down, each over the one before. */
    const count = spec.series.length;
    const order = (place) => (spec.stacked ? count - 1 - place : place);
    let raw = [[], ...spec.series.map(() => [])];
    const stackedData = () => {
      const sums = [];
      let under = raw[0].map(() => 0);
      for (let place = 0; place < count; place++) {
        under = raw[place + 1].map((value, i) => (value === null || value === undefined ? null : value + (under[i] || 0)));
        sums.push(under);
      }
      return [raw[0], ...sums.reverse()];
    };
    const font = "11px system-ui, sans-serif";
    const xTicks = spec.x && spec.x.ticks;
    const whole = spec.x && spec.x.whole;
    /* A zoom ends at the edges of the data; `whole` is what is shown without one. */
    const rangeX = (self, low, high) => {
      const edge = self.data[0];
      return low === edge[0] && high === edge[edge.length - 1] ? whole : [low, high];
    };
    const splits = (log, isX) => (log ? { splits: (self, _, low, high) => logTicks(self, low, high, isX), filter: (self, ticks) => ticks } : {});
    const axis = (log, label, isX) => ({
      stroke: () => color("muted"), font, labelFont: font, label: label || undefined, labelSize: 16, labelGap: 0,
      grid: { stroke: () => color("line"), width: 1, show: !isX || !!spec.gridX }, ticks: { show: isX, stroke: () => color("axis"), width: 1, size: 4 },
      size: isX ? 26 : 50, gap: 4, space: isX ? 60 : log ? 22 : 32,
      values: (self, ticks) => ticks.map((tick) => (tick === null ? "" : (isX ? formatX : format)(tick))),
      ...splits(log, isX), ...(isX && xTicks ? { splits: () => xTicks } : {}),
    });
    const options = {
      width: 300, height: spec.height || 170, legend: { show: false }, padding: [8, 18, 0, 0],
      cursor: {
        y: false, points: { size: 7 }, drag: { x: !!spec.zoom, y: false, setScale: !!spec.zoom },
        sync: spec.sync ? { key: spec.sync, setSeries: false } : undefined,
      },
      scales: {
        x: { time: false, distr: spec.x && spec.x.log ? 3 : 1, range: whole ? rangeX : spec.x && spec.x.range ? () => spec.x.range : undefined },
        y: { distr: spec.y && spec.y.log ? 3 : 1, range: spec.y && spec.y.range ? spec.y.range : spec.y && spec.y.log ? undefined : fromZero },
      },
      axes: [axis(spec.x && spec.x.log, spec.x && spec.x.label, true), axis(spec.y && spec.y.log, spec.y && spec.y.label, false)],
      series: [{ }, ...spec.series.map((_, place) => seriesOptions(spec, spec.series[order(place)]))],
      hooks: { setCursor: [() => tell()], ...(spec.hooks || {}) },
    };
    const u = new uPlot(options, [[], ...spec.series.map(() => [])], plot);
    const told = el("span", { class: "muted" });
    legend.append(told);
    function tell() {
      const idx = u.cursor.idx;
      const inside = idx !== null && idx !== undefined && u.cursor.left >= 0;
      const place = inside ? idx : spec.live ? raw[0].length - 1 : -1;
      values.forEach((node, i) => {
        const value = place < 0 ? null : spec.live ? raw[i + 1][place] : nearest(raw[i + 1], place);
        node.textContent = place < 0 || value === null || value === undefined ? "" : format(value);
      });
      told.textContent = inside && raw[0].length ? `at ${formatX(raw[0][idx])}` : "";
    }
    const fit = () => { const width = plot.clientWidth; if (width > 0 && width !== u.width) u.setSize({ width, height: u.height }); };
    new ResizeObserver(fit).observe(plot);
    const made = {
      u, redraw: () => u.redraw(false, true),
      set(data) { raw = data; u.setData(spec.stacked ? stackedData() : raw); tell(); },
      zoomTo(range) { u.setScale("x", range); },
    };
    if (spec.zoom) plot.addEventListener("dblclick", () => u.setData(u.data, true));
    charts.add(made);
    fit();
    return made;
  }
  /* Curves of a report have different points; the legend shows the nearest one. */
  function nearest(values, place) {
    for (let step = 0; step < 400; step++) {
      for (const at of [place - step, place + step]) if (values[at] !== null && values[at] !== undefined) return values[at];
    }
    return null;
  }
  const fromZero = (self, low, high) => [Math.min(0, low === null ? 0 : low), high === null || high <= 0 ? 1 : high * 1.08];
  /* On a log axis: all digits, a few of them, or 1, 2 and 5 of each power of ten where there is room, else powers alone, else every other one. */
  function logTicks(self, low, high, isX) {
    if (!(low > 0 && high > low)) return [];
    const room = (isX ? self.bbox.width : self.bbox.height) / devicePixelRatio / Math.log10(high / low) / (isX ? 46 : 20);
    const digits = room > 22 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : room > 7 ? [1, 2, 3, 5, 7] : room >= 3.4 ? [1, 2, 5] : [1];
    const apart = Math.max(1, Math.ceil(1 / room)), found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      if (power % apart) continue;
      for (const digit of digits) {
        const tick = Number(`${digit}e${power}`);
        if (tick >= low && tick <= high) found.push(tick);
      }
    }
    return found;
  }
  function seriesOptions(spec, one) {
    const kind = one.kind || "line";
    const options = {
      stroke: () => color(one.color), width: one.width || 2, points: { show: false }, spanGaps: !!one.spanGaps,
    };
    if (kind === "area") options.fill = () => fade(one.color, 0.14);
    if (spec.stacked) { options.fill = () => mix(one.color); options.stroke = () => color("surface"); options.width = 1; }
    if (kind === "dash") { options.dash = [5, 4]; options.width = 1.5; }
    if (kind === "dots") { options.paths = () => null; options.points = { show: true, size: 3.5, width: 0, fill: () => fade(one.color, 0.55), stroke: () => fade(one.color, 0.55) }; }
    if (kind === "points") options.points = { show: true, size: 7, width: 0, fill: () => color(one.color), stroke: () => color(one.color) };
    if (kind === "steps") options.paths = uPlot.paths.stepped({ align: 1 });
    return options;
  }
  const mix = (name) => fade(name, 1);
  /* Tiles in `host`, {name: title}; returns what sets one: (name, text, unit, note). */
  function tiles(host, titles) {
    const made = {};
    for (const [name, text] of Object.entries(titles)) {
      made[name] = { value: el("div", { class: "value" }), note: el("div", { class: "note" }) };
      host.append(el("div", { class: "tile" }, el("div", { class: "name", text }), made[name].value, made[name].note));
    }
    return (name, text, unit, note) => {
      made[name].value.replaceChildren(text, unit ? el("small", { text: ` ${unit}` }) : "");
      made[name].note.textContent = note || "";
    };
  }
  return { initTheme, color, slot, fade, el, key, number, percent, duration, chart, trim, isDark, redraw, remembered, tiles };
})();
