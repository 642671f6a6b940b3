/* The router's page: polls /metrics and /workers once a second while it is visible. */
"use strict";
(() => {
  const { el, key, number, percent, duration, slot, chart } = Yard;
  const $ = (id) => document.getElementById(id);
  const KEPT = 120, PREFIX = "tokenyard_router_", SPILLED = ["spilled_for_load", "spilled_by_bound"];
  const KEY_AT = "tokenyard.router.key";
  let secret = "";
  try { secret = sessionStorage.getItem(KEY_AT) || ""; } catch { /* none kept */ }
  const headers = () => (secret ? { authorization: `Bearer ${secret}` } : {});
  let refused = null;
  const history = [];
  const targetSlots = new Map(), plots = {};

  /* Prometheus text as {name: [{labels, value}]}. */
  function parse(text) {
    const found = {};
    for (const line of text.split("\n")) {
      const match = /^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
      if (!match || !match[1].startsWith(PREFIX)) continue;
      const labels = {};
      for (const part of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[part[1]] = part[2];
      (found[match[1].slice(PREFIX.length)] ||= []).push({ labels, value: Number(match[3]) });
    }
    return found;
  }
  const one = (metrics, name) => (metrics[name] && metrics[name].length ? metrics[name][0].value : 0);
  const by = (metrics, name, label) => Object.fromEntries((metrics[name] || []).map((sample) => [sample.labels[label], sample.value]));

  /* How much a reading has grown over about `seconds`, and how long that took. */
  function growth(read, seconds, end = history.length - 1) {
    const last = history[end];
    let first = last;
    for (let place = end; place >= 0 && last.at - history[place].at <= seconds + 0.2; place--) first = history[place];
    return { amount: read(last.metrics) - read(first.metrics), took: last.at - first.at };
  }
  const rate = (read, seconds, end) => { const grown = growth(read, seconds, end); return grown.took > 0 ? grown.amount / grown.took : null; };
  function ratio(part, whole, seconds, end) {
    const below = growth((m) => one(m, whole), seconds, end).amount;
    return below > 0 ? growth((m) => one(m, part), seconds, end).amount / below : null;
  }

  const tile = Yard.tiles($("tiles"), { workers: "Workers", rate: "Requests", open: "Open", queue: "Waiting here", hits: "Cache hits, 60 s", spills: "Spills, 60 s", errors: "Errors, 60 s" });
  function showTiles(metrics) {
    const states = (metrics.worker_state || []).filter((sample) => sample.value === 1);
    const healthy = states.filter((sample) => sample.labels.state === "healthy").length;
    tile("workers", `${healthy}`, `of ${states.length}`, healthy === states.length ? "all healthy" : states.filter((s) => s.labels.state !== "healthy").map((s) => s.labels.state).join(", "));
    tile("rate", number(rate((m) => one(m, "requests_total"), 5)), "/s", `${number(one(metrics, "requests_total"))} since the start`);
    tile("open", number(one(metrics, "open_requests")), "", `imbalance ${number(one(metrics, "load_imbalance"))}`);
    tile("queue", number(one(metrics, "queue_requests")), "", `${number(one(metrics, "queued_total"))} had to wait so far`);
    tile("hits", percent(ratio("cached_tokens_total", "reported_prompt_tokens_total", 60)), "", one(metrics, "reported_prompt_tokens_total") ? `expected ${percent(ratio("predicted_cached_tokens_total", "reported_prompt_tokens_total", 60))}` : "no answer with usage yet");
    const chosen = growth((m) => Object.values(by(m, "choices_total", "reason")).reduce((a, b) => a + b, 0), 60).amount;
    const spilled = growth((m) => SPILLED.reduce((all, reason) => all + (by(m, "choices_total", "reason")[reason] || 0), 0), 60).amount;
    tile("spills", number(spilled), "", chosen ? `${percent(spilled / chosen)} of ${number(chosen)} choices` : "");
    const errors = growth((m) => (m.errors_total || []).reduce((all, sample) => all + sample.value, 0), 60).amount;
    tile("errors", number(errors), "", `${number(one(metrics, "retries_total"))} retried, ${number(one(metrics, "continued_total"))} continued`);
  }

  function targetColor(name) {
    if (!targetSlots.has(name)) targetSlots.set(name, targetSlots.size);
    return slot(targetSlots.get(name));
  }
  async function lever(worker, verb) {
    const status = $("workers-answer");
    try {
      const response = await fetch(`workers/${encodeURIComponent(worker.id)}/${verb}`, { method: "POST", headers: headers() });
      status.className = response.ok ? "good" : "bad";
      status.textContent = response.ok ? `${worker.id}: ${verb === "drain" ? "gets no new requests" : "gets requests again"}` : (await response.json()).error.message;
    } catch {
      status.className = "bad"; status.textContent = "the router does not answer";
    }
  }
  function showWorkers(workers, metrics) {
    const blocks = by(metrics, "worker_index_blocks", "target"), sent = by(metrics, "worker_requests_total", "target"), errors = by(metrics, "worker_errors_total", "target");
    const most = Math.max(1, ...workers.flatMap((worker) => worker.targets.map((target) => target.requests)));
    const body = el("tbody", {});
    for (const worker of workers) worker.targets.concat(worker.targets.length ? [] : [null]).forEach((target, place) => {
      const fill = el("i", {});
      fill.style.width = target ? `${(100 * target.requests) / most}%` : "0";
      const good = worker.state === "healthy";
      const state = el("td", {}, el("i", { class: `dot ${good ? "on" : worker.state === "unhealthy" ? "off" : "wait"}` }), ` ${target && target.breaker !== "closed" && good ? `breaker ${target.breaker}` : worker.state}`);
      const draining = worker.state === "draining";
      const button = el("button", { type: "button", class: "plain", text: draining ? "resume" : "drain", onclick: () => lever(worker, draining ? "resume" : "drain") });
      body.append(el("tr", {},
        el("td", {}, target ? key(targetColor(target.target)) : null, el("span", { class: "name", text: ` ${target ? target.target : worker.url}` })), state,
        el("td", { text: worker.models.join(", ") || "–" }),
        el("td", {}, el("span", { class: "load" }, fill), number(target ? target.requests : null)),
        el("td", { text: number(target ? target.prefill_tokens : null) }), el("td", { text: number(target ? target.context_tokens : null) }),
        el("td", { text: target ? number(blocks[target.target]) : "–" }), el("td", { text: percent(target ? target.cache_credit : null) }),
        el("td", { text: target ? `× ${number(target.slowness)}` : "–" }), el("td", { text: number(target ? sent[target.target] || 0 : null) }),
        el("td", { text: number(target ? errors[target.target] || 0 : null) }), el("td", {}, place ? null : button)));
    });
    const heads = ["Target", "State", "Models", "Open", "Prefill tokens", "Context tokens", "Blocks", "Hits of expected", "Slowness", "Sent", "Errors", ""];
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col", text })))), body);
    if (!$("workers").contains(document.activeElement)) $("workers").replaceChildren(workers.length ? table : el("p", { class: "empty", text: "There are no workers." }));
    $("workers-note").textContent = "slowness: first tokens against those predicted";
  }

  const ago = (value) => (value === 0 ? "now" : `${Math.abs(Math.round(value))} s ago`);
  const plot = (host, series, y, more) => chart(host, { height: 170, live: true, sync: "router", x: { range: [-KEPT, 0], format: ago }, y, series, ...more });
  function targetPlot() {
    const names = [...targetSlots.keys()].slice(0, 8);
    if (plots.names === names.join()) return;
    plots.names = names.join();
    $("chart-targets").replaceChildren();
    plots.targets = names.length ? plot($("chart-targets"), names.map((name) => ({ label: name, color: targetColor(name) })), {}) : null;
  }
  function reasonPlot(reasons) {
    if (plots.reasonNames || !reasons.length) return;
    plots.reasonNames = reasons;
    plots.reasons = plot($("chart-reasons"), reasons.map((label, place) => ({ label: label.replaceAll("_", " "), color: slot(place) })), {}, { stacked: true });
  }
  function makePlots() {
    plots.hits = plot($("chart-hits"), [{ label: "actual", color: slot(1) }, { label: "expected", color: slot(4), kind: "dash" }], { format: percent, range: () => [0, 1] });
    plots.queue = plot($("chart-queue"), [{ label: "waiting", color: slot(2), kind: "area" }], {});
    plots.first = plot($("chart-first"), [{ label: "mean first byte (ms)", color: slot(0) }], {});
  }
  function showPlots() {
    const last = history[history.length - 1];
    Object.keys(by(last.metrics, "worker_requests", "target")).sort().forEach(targetColor);
    targetPlot();
    reasonPlot(Object.keys(by(last.metrics, "choices_total", "reason")));
    const xs = history.map((moment) => moment.at - last.at);
    const series = (read) => history.map((moment, place) => read(moment.metrics, place));
    if (plots.targets) plots.targets.set([xs, ...plots.names.split(",").map((name) => series((m) => by(m, "worker_requests", "target")[name] ?? null))]);
    plots.hits.set([xs, series((m, place) => ratio("cached_tokens_total", "reported_prompt_tokens_total", 10, place)), series((m, place) => ratio("predicted_cached_tokens_total", "reported_prompt_tokens_total", 10, place))]);
    if (plots.reasons) plots.reasons.set([xs, ...plots.reasonNames.map((name) => series((m, place) => rate((n) => by(n, "choices_total", "reason")[name] || 0, 5, place)))]);
    plots.queue.set([xs, series((m) => one(m, "queue_requests"))]);
    plots.first.set([xs, series((m, place) => { const mean = ratio("ttft_seconds_sum", "ttft_seconds_count", 10, place); return mean === null ? null : 1000 * mean; })]);
  }

  function state(kind, text) { $("live-dot").className = `dot ${kind}`; $("live-text").textContent = text; }
  async function poll() {
    if (document.hidden) return;
    const answer = await fetch("metrics");
    const metrics = parse(await answer.text());
    history.push({ at: performance.now() / 1000, metrics });
    while (history.length > 1 && history[0].at < history[history.length - 1].at - KEPT) history.shift();
    showTiles(metrics); showPlots();
    if (refused === secret) { state("wait", "metrics only; give the key for workers"); return; }
    const workers = await fetch("workers", { headers: headers() });
    if (workers.status === 401) { refused = secret; return; }
    showWorkers((await workers.json()).workers, metrics);
    state("on", "live");
  }
  async function about() {
    const answer = await fetch("server_info", { headers: headers() });
    if (!answer.ok) return;
    const info = await answer.json();
    $("policy").textContent = `policy ${info.policy}`;
    $("version").textContent = `Tokenyard ${info.version}`;
  }
  async function run() {
    for (;;) {
      try { await poll(); } catch { state("off", "the router does not answer"); }
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
  Yard.initTheme($("theme"));
  makePlots();
  $("keys-open").addEventListener("click", () => { $("key").value = secret; $("keys").showModal(); });
  $("keys-close").addEventListener("click", () => $("keys").close());
  $("keys-form").addEventListener("submit", (event) => {
    event.preventDefault();
    secret = $("key").value.trim();
    try { sessionStorage.setItem(KEY_AT, secret); } catch { /* kept in memory only */ }
    $("keys").close();
    about().catch(() => {});
  });
  about().catch(() => {});
  run();
})();
