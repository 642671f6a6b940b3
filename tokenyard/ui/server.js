/* The server's page: follows /v1/live and shows it. */
"use strict";
(() => {
  const { el, key, number, percent, duration, slot, chart } = Yard;
  const $ = (id) => document.getElementById(id);
  const SECONDS = 60, BINS = 240, PER_SECOND = 4;
  const LEVEL_COLOR = { strict: slot(4), high: slot(0), normal: slot(1), low: slot(2) };
  const STATE_TEXT = { waiting: "waiting", loading: "loading", prefill: "prefill", running: "running" };

  /* ---- keys: in this tab's session only, sent in a header and never in an address ---- */
  const keys = { api: "", admin: "" };
  const KEYS_AT = "tokenyard.keys";
  try { Object.assign(keys, JSON.parse(sessionStorage.getItem(KEYS_AT) || "{}")); } catch { /* none kept */ }
  const bearer = (value) => (value ? { authorization: `Bearer ${value}` } : {});
  const apiHeaders = () => bearer(keys.api || keys.admin);
  const adminHeaders = () => bearer(keys.admin || keys.api);

  async function ask(method, path, body) {
    try {
      const headers = { ...adminHeaders(), ...(body === undefined ? {} : { "content-type": "application/json" }) };
      const response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
      if (!response.ok) return { ok: false, message: await YardChat.failure(response) };
      return { ok: true, value: await response.json() };
    } catch {
      return { ok: false, message: "the server does not answer" };
    }
  }

  /* ---- state from the stream ---- */
  const seen = { bins: new Map(), moments: new Map(), totals: [], server: null, tick: null, prefixes: null, texts: new Map() };
  const tenantSlots = new Map();
  const BIN = { steps: 1, prefill: 2, decode: 3, busy_ms: 4, longest_ms: 5, predicted_ms: 6 };

  function take(tick) {
    seen.tick = tick;
    if (tick.server) { seen.server = tick.server; about(tick.server); seen.totals.length = 0; }
    for (const bin of tick.bins || []) seen.bins.set(bin[0], bin);
    if (tick.kv) seen.moments.set(tick.now, { kv: tick.kv, counts: tick.counts, budget: tick.budget_ms });
    for (const store of [seen.bins, seen.moments]) for (const index of store.keys()) if (index < tick.now - BINS - 8) store.delete(index);
    if (tick.totals) seen.totals.push({ at: tick.at, totals: tick.totals, slo: tick.slo, goodput: tick.goodput });
    while (seen.totals.length > 1 && seen.totals[0].at < tick.at - SECONDS) seen.totals.shift();
    if (tick.prefixes) { seen.prefixes = tick.prefixes; seen.cut = tick.prefixes_cut; }
    if (!document.hidden) show(tick);
  }

  /* How much a total has grown, over at most the last `seconds`. */
  function growth(read, seconds = SECONDS) {
    const all = seen.totals;
    if (all.length < 2) return { amount: 0, per: 0 };
    const last = all[all.length - 1];
    const first = all.find((one) => one.at >= last.at - seconds - 0.1) || all[0];
    const amount = read(last) - read(first), took = last.at - first.at;
    return { amount, per: took > 0 ? amount / took : 0 };
  }

  /* ---- the parts ---- */
  const tile = Yard.tiles($("tiles"), { running: "Running", waiting: "Waiting", output: "Output", met: "Targets met", goodput: "Goodput", kv: "KV in use", hits: "Cache hits", sessions: "Sessions" });

  function showTiles(tick) {
    const { counts, kv } = tick;
    const placed = counts.running + counts.prefilling + counts.loading;
    tile("running", number(placed), "", counts.prefilling ? `${number(counts.prefilling)} in prefill` : "");
    tile("waiting", number(counts.waiting), "", tick.paused ? "the engine is paused" : "");
    tile("output", number(growth((one) => one.totals.generated_tokens, 3).per), "tok/s", "over 3 s");
    const met = growth((one) => sum(one.slo, 0)).amount, missed = growth((one) => sum(one.slo, 1)).amount;
    tile("met", met + missed ? percent(met / (met + missed)) : "–", "", met + missed ? `${number(met)} of ${number(met + missed)} in ${lately()}` : "no target yet");
    tile("goodput", number(growth((one) => total(one.goodput)).per), "tok/s", `over ${lately()}`);
    const used = kv.total - kv.free - kv.cached;
    tile("kv", percent(used / Math.max(kv.total, 1)), "", `+ ${percent(kv.cached / Math.max(kv.total, 1))} cached`);
    const asked = growth((one) => one.totals.prompt_tokens).amount, hit = growth((one) => one.totals.hit_tokens).amount;
    tile("hits", asked ? percent(hit / asked) : "–", "", asked ? `of ${number(asked)} in ${lately()}` : "");
    const { active_sessions: active, resident_sessions: resident } = tick.sessions;
    const evicted = growth((one) => one.totals.evicted_sessions).amount;
    tile("sessions", number(active), "", `+ ${number(resident)} idle with KV${evicted ? `, ${number(evicted)} evicted in ${lately()}` : ""}`);
  }
  const sum = (byLevel, place) => Object.values(byLevel).reduce((all, one) => all + one[place], 0);
  const total = (byLevel) => Object.values(byLevel).reduce((all, one) => all + one, 0);

  function tenantColor(tenant) {
    if (!tenant || (tenantSlots.size >= 8 && !tenantSlots.has(tenant))) return "other";
    if (!tenantSlots.has(tenant)) tenantSlots.set(tenant, tenantSlots.size);
    return slot(tenantSlots.get(tenant));
  }

  function showBars(tick) {
    for (const tenant of tick.groups.map((group) => group[2]).sort()) tenantColor(tenant);
    const levels = seen.server ? seen.server.levels : [];
    const states = [["waiting", "Waiting"], ["placed", "Running"]];
    const found = new Map();
    let most = 1;
    for (const [state, level, tenant, requests] of tick.groups) {
      const place = `${state === "waiting" ? "waiting" : "placed"} ${levels[level]}`;
      if (!found.has(place)) found.set(place, new Map());
      const byTenant = found.get(place);
      byTenant.set(tenant, (byTenant.get(tenant) || 0) + requests);
    }
    for (const byTenant of found.values()) most = Math.max(most, [...byTenant.values()].reduce((a, b) => a + b, 0));
    const rows = [];
    for (const [state, text] of states) {
      for (const level of levels) {
        const byTenant = found.get(`${state} ${level}`);
        if (!byTenant && !(level === "normal")) continue;
        rows.push(barRow(`${text}, ${level}`, byTenant || new Map(), most));
      }
    }
    $("bars").replaceChildren(...rows);
    const names = [...tenantSlots.keys()].filter((name) => tenantSlots.get(name) < 8).sort();
    if (names.length) names.push(tenantSlots.size > 8 ? "none or further tenants" : "no tenant");
    $("tenants").replaceChildren(...names.map((name) => el("span", {}, key(tenantSlots.has(name) ? tenantColor(name) : "other"), el("span", { text: name }))));
  }
  function barRow(name, byTenant, most) {
    const bar = el("div", { class: "bar" });
    let all = 0;
    let small = 0;
    for (const [tenant, count] of [...byTenant].sort((a, b) => (a[0] < b[0] ? -1 : 1))) {
      all += count;
      const color = tenantColor(tenant);
      if (color === "other") { small += count; continue; }
      bar.append(part(color, count, most, `${tenant || "no tenant"}: ${count}`));
    }
    if (small) bar.append(part("other", small, most, `no tenant, or a further one: ${small}`));
    const tenants = byTenant.size > 1 ? ` · ${byTenant.size} tenants` : "";
    return el("div", { class: "bar-row" }, el("span", { class: "name", text: name }), bar, el("span", { class: "count", text: `${number(all)}${tenants}` }));
  }
  function part(color, count, most, title) {
    const one = el("i", { title });
    one.style.background = `var(--${color})`;
    one.style.width = `${(100 * count) / most}%`;
    return one;
  }

  const rowNodes = new Map();
  function showRows(tick) {
    const levels = seen.server ? seen.server.levels : [];
    const order = { prefill: 0, loading: 1, running: 2, waiting: 3 };
    const rows = [...tick.rows].sort((a, b) => order[a[1]] - order[b[1]]);
    const present = new Set(rows.map((row) => row[0]));
    for (const [id, node] of rowNodes) if (!present.has(id)) { node.root.remove(); rowNodes.delete(id); }
    const used = new Set();
    for (const row of rows) {
      if (used.has(row[0])) continue;
      used.add(row[0]);
      fillRow(rowNodes.get(row[0]) || makeRow(row[0]), row, levels);
    }
    rows.forEach((row, place) => {
      const node = rowNodes.get(row[0]).root;
      if ($("rows").children[place] !== node && document.activeElement !== node) $("rows").insertBefore(node, $("rows").children[place] || null);
    });
    const all = tick.groups.reduce((count, group) => count + group[3], 0);
    $("rows-empty").hidden = all > 0;
    $("rows-note").textContent = all > rows.length ? `the first ${rows.length} of ${number(all)}` : all ? "click one to see where its time goes" : "";
  }
  /* Ids of one client often begin alike. */
  const shortened = (id) => (id.length > 20 ? `${id.slice(0, 7)}…${id.slice(-11)}` : id);
  function makeRow(id) {
    const parts = { kind: el("i", { class: "kind" }), id: el("span", { class: "id", text: shortened(id) }), state: el("span", { class: "state" }), hit: el("i", {}), done: el("i", {}), prompt: el("i", { class: "prompt" }), age: el("span", { class: "age" }) };
    parts.done.style.background = "var(--s1)"; parts.hit.style.background = "var(--s2)";
    parts.root = el("button", { type: "button", class: "row", onclick: () => YardRequest.open(id) }, parts.kind, parts.id, parts.state, el("span", { class: "track" }, parts.done, parts.hit, parts.prompt), parts.age);
    rowNodes.set(id, parts);
    $("rows").append(parts.root);
    return parts;
  }
  function fillRow(parts, row, levels) {
    const [id, state, level, tenant, age, prompt, hit, computed, known, limit, paused] = row;
    const share = (tokens) => `${Math.min(100, (100 * tokens) / Math.max(limit, 1))}%`;
    const level_ = levels[level] || "normal";
    parts.kind.style.background = `var(--${LEVEL_COLOR[level_]})`;
    parts.state.textContent = paused ? "paused" : STATE_TEXT[state];
    parts.done.style.width = share(state === "waiting" ? 0 : computed);
    parts.hit.style.width = share(state === "waiting" ? 0 : Math.min(hit, computed));
    parts.prompt.style.width = share(prompt);
    parts.age.textContent = duration(age);
    const text = `${id}, ${level_}${tenant ? `, tenant ${tenant}` : ""}: ${parts.state.textContent}, ${computed} of at most ${limit} tokens computed, prompt ${prompt}, ${hit} from the cache, ${known - prompt} written, age ${duration(age)}`;
    parts.root.setAttribute("aria-label", text);
    parts.root.title = text;
  }

  /* ---- curves over the last 60 s: x in seconds before now ---- */
  const plots = {};
  const ago = (value) => (value === 0 ? "now" : `${Math.abs(Math.round(value))} s ago`);
  const live = (height, series, y, more) => ({ height, live: true, sync: "live", x: { range: [-SECONDS, 0], format: ago }, y, series, ...more });
  function makePlots() {
    const rate = (value) => number(value);
    plots.tokens = chart($("chart-tokens"), live(168, [{ label: "decode", color: slot(1) }, { label: "prefill", color: slot(0) }], { format: rate }, { stacked: true }));
    plots.steps = chart($("chart-steps"), live(168, [
      { label: "longest", color: slot(0), width: 1.5 }, { label: "mean", color: slot(1) },
      { label: "predicted", color: slot(4), kind: "dash" }, { label: "budget", color: slot(5), kind: "dash" }], { format: duration, range: stepRange }));
    plots.requests = chart($("chart-requests"), live(168, [{ label: "running", color: slot(0) }], { format: rate }));
    plots.waiting = chart($("chart-waiting"), live(168, [{ label: "waiting", color: slot(2), kind: "area" }], { format: rate }));
    plots.kv = chart($("chart-kv"), live(168, [
      { label: "requests", color: slot(0) }, { label: "shared", color: slot(4) }, { label: "cached", color: slot(1) }, { label: "held", color: slot(7) }], { format: rate, range: () => [0, kvTotal()] }, { stacked: true }));
  }
  /* A budget far above the steps would press them flat, so it is left out of the range; the legend shows it. */
  function stepRange(self) {
    const tallest = (place) => Math.max(0, ...self.data[place].filter((value) => value !== null));
    const steps = Math.max(tallest(1), tallest(3)), budget = tallest(4);
    return [0, 1.1 * (budget < 3 * steps ? Math.max(steps, budget) : steps) || 1];
  }
  const kvTotal = () => (seen.tick && seen.tick.kv ? seen.tick.kv.total : 1);

  function showPlots(tick) {
    const first = Math.min(...seen.moments.keys(), ...seen.bins.keys());
    const xs = [], tokens = [[], []], steps = [[], [], [], []], requests = [[], []], kv = [[], [], [], []];
    for (let index = tick.now - BINS; index < tick.now; index++) {
      xs.push((index + 1 - tick.now) / PER_SECOND);
      const bin = seen.bins.get(index), moment = seen.moments.get(index), known = index >= first;
      tokens[0].push(bin ? bin[BIN.decode] * PER_SECOND : known ? 0 : null);
      tokens[1].push(bin ? bin[BIN.prefill] * PER_SECOND : known ? 0 : null);
      const stepping = bin && bin[BIN.steps];
      steps[0].push(stepping ? bin[BIN.longest_ms] : null);
      steps[1].push(stepping ? bin[BIN.busy_ms] / bin[BIN.steps] : null);
      steps[2].push(stepping && bin[BIN.predicted_ms] ? bin[BIN.predicted_ms] / bin[BIN.steps] : null);
      steps[3].push(moment && moment.budget ? moment.budget : null);
      requests[0].push(moment ? moment.counts.waiting : null);
      requests[1].push(moment ? moment.counts.running + moment.counts.prefilling + moment.counts.loading : null);
      for (const [place, name] of ["rows", "shared", "cached", "held"].entries()) kv[place].push(moment ? moment.kv[name] : null);
    }
    plots.tokens.set([xs, ...tokens]);
    plots.steps.set([xs, ...steps]);
    plots.waiting.set([xs, bridged(requests[0])]);
    plots.requests.set([xs, bridged(requests[1])]);
    plots.kv.set([xs, ...kv.map(bridged)]);
    const error = tick.step_time_error;
    const budget = tick.budget_tokens > 0 ? `at most ${number(tick.budget_tokens)} prompt tokens a step` : "";
    $("budget").textContent = [budget, error === null || error === undefined ? "" : `cost model off by ${percent(error)}`].filter(Boolean).join(" · ");
    const stores = Object.entries(tick.kv_store).map(([name, store]) => `${name}: ${number(store.tokens)} tokens, ${number(store.bytes / 1e6)} MB${store.loading ? `, ${store.loading} loading` : ""}`);
    $("kv-note").textContent = [`${number(tick.kv.total)} tokens, ${number(tick.kv.free)} free`, ...stores].join(" · ");
  }
  /* A missed sample repeats the one before it, for up to 8 bins. */
  function bridged(values) {
    let held = null, gap = 0;
    return values.map((value) => {
      if (value !== null) { held = value; gap = 0; return value; }
      gap += 1;
      return gap <= 8 ? held : null;
    });
  }

  /* ---- tables ---- */
  async function textOf(ids) {
    const name = ids.join(" ");
    if (!seen.texts.has(name)) {
      seen.texts.set(name, "…");
      if (seen.texts.size > 300) seen.texts.delete(seen.texts.keys().next().value);
      const answer = await ask("POST", "detokenize", { tokens: ids, skip_special_tokens: false });
      seen.texts.set(name, answer.ok ? answer.value.prompt : `tokens ${ids.slice(0, 8).join(" ")} …`);
      showPrefixes();
    }
    return seen.texts.get(name);
  }
  function showPrefixes() {
    const found = seen.prefixes;
    if (!found) return;
    $("prefix-note").textContent = seen.cut ? "by tokens saved; the tree has more than was searched" : "by tokens saved; a dot marks those in use";
    if (!found.length) { $("prefixes").replaceChildren(el("p", { class: "empty", text: "No prefix was used twice yet." })); return; }
    const body = el("tbody", {});
    const most = Math.max(...found.map((one) => one.hits * one.tokens));
    for (const one of found.filter((one) => one.hits * one.tokens > most / 100)) {
      textOf(one.head);
      const text = (one.begin ? "… " : "") + visible(seen.texts.get(one.head.join(" ")) || "…");
      const use = el("i", { class: `dot ${one.in_use ? "on" : ""}`, title: one.in_use ? "in use now" : "not in use" });
      body.append(el("tr", {}, el("td", {}, el("span", { class: "prefix" }, use, el("span", { text, title: text }))),
        el("td", { text: number(one.begin + one.tokens) }), el("td", { text: number(one.hits) }), el("td", { text: number(one.hits * one.tokens) })));
    }
    $("prefixes").replaceChildren(table(["Prefix", "Depth", "Hits", "Saved"], body));
  }
  /* The span of the totals in words: at most a minute, less until the page has been open for that long. */
  function lately() {
    const all = seen.totals;
    return `${all.length ? Math.min(SECONDS, Math.round(all[all.length - 1].at - all[0].at)) : 0} s`;
  }
  const visible = (text) => text.replace(/\n/g, "⏎").replace(/\s+/g, " ");
  function table(heads, body) {
    return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col", text })))), body);
  }
  function showSlo(tick) {
    const body = el("tbody", {});
    for (const level of seen.server ? seen.server.levels : []) {
      const [met, missed] = tick.slo[level];
      if (!(met + missed)) continue;
      const lately = [0, 1].map((place) => growth((one) => one.slo[level][place]).amount);
      const now = lately[0] + lately[1] ? lately[0] / (lately[0] + lately[1]) : null;
      const fill = el("i", { class: now === null ? "" : now >= 0.9 ? "" : now >= 0.5 ? "warn" : "bad" });
      fill.style.width = `${100 * (now || 0)}%`;
      const name = el("td", {}, key(LEVEL_COLOR[level]), ` ${level}`);
      body.append(el("tr", {}, name, el("td", {}, el("span", { class: "meter", "aria-hidden": "true" }, fill), percent(now)), el("td", { text: number(lately[1]) }),
        el("td", { text: `${number(growth((one) => one.goodput[level]).per)} tok/s` }), el("td", { text: percent(met / (met + missed)) }), el("td", { text: number(met + missed) })));
    }
    if (!body.children.length) $("slo").replaceChildren(el("p", { class: "empty", text: "No request with a target has ended yet. Targets come with a request (slo: {ttft_ms, tpot_ms}, or deadline_ms) or with its class (--slo-classes)." }));
    else $("slo").replaceChildren(table(["Class", `Met, ${lately()}`, "Missed", "Goodput", "Met, all", "Ended"], body));
  }

  /* ---- the policy ---- */
  function showPolicy(tick) {
    const options = Object.entries(tick.policy_options || {}).map(([name, value]) => `${name}=${value}`).join(", ");
    $("policy-now").textContent = `${tick.policy || ""}${options ? ` (${options})` : ""}`;
    $("overtaking").textContent = tick.overtaking ? `What may overtake a request: ${tick.overtaking}` : "";
    $("policy-note").textContent = tick.policy_note || "";
  }
  function readOptions(text) {
    const options = {};
    for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
      const at = part.indexOf("=");
      if (at < 1) throw new Error(`write name=value, not ${part}`);
      const value = part.slice(at + 1).trim();
      options[part.slice(0, at).trim()] = value === "true" ? true : value === "false" ? false : value !== "" && !Number.isNaN(Number(value)) ? Number(value) : value;
    }
    return options;
  }
  async function setPolicy(event) {
    event.preventDefault();
    const status = $("policy-answer");
    let answer;
    try {
      answer = await ask("POST", "v1/scheduler", { policy: $("policy").value, options: readOptions($("options").value) });
    } catch (error) {
      answer = { ok: false, message: error.message };
    }
    status.className = answer.ok ? "good" : "bad";
    status.textContent = answer.ok ? `The queue is now ordered by ${answer.value.policy}.` : answer.message;
  }

  /* ---- connection and start ---- */
  function about(server) {
    $("model").textContent = server.model;
    $("version").textContent = `Tokenyard ${server.version}, up since ${new Date(server.started * 1000).toLocaleString()}`;
    document.title = `${server.model} · Tokenyard`;
    const chosen = $("policy").value;
    $("policy").replaceChildren(...server.policies.map((name) => el("option", { value: name, text: name })));
    const now = seen.tick && seen.tick.policy ? seen.tick.policy.split("+").pop() : "";
    $("policy").value = server.policies.includes(chosen) ? chosen : server.policies.includes(now) ? now : server.policies[0];
  }
  function show(tick) {
    if (!tick.counts) return;
    showTiles(tick); showBars(tick); showRows(tick); showPlots(tick); showSlo(tick); showPolicy(tick);
    if (tick.prefixes) showPrefixes();
  }
  function state(kind, text, banner) {
    $("live-dot").className = `dot ${kind}`;
    $("live-text").textContent = text;
    $("banner").hidden = !banner;
    $("banner").textContent = banner || "";
  }
  function phase(tick) {
    if (tick.phase === "loading") return state("wait", "loading", "The model is still loading; requests are refused until it is there.");
    if (tick.phase === "dead") return state("off", "stopped", `The engine has stopped: ${tick.why || "unknown reason"}`);
    if (tick.phase !== "ready") return state("wait", "draining", "The server is shutting down; open requests go on.");
    return tick.why ? state("wait", "busy", tick.why) : state("on", "live");
  }

  let connection = null, pause = 500;
  async function follow() {
    if (connection) connection.abort();
    const mine = (connection = new AbortController());
    while (!mine.signal.aborted) {
      try {
        const response = await fetch("v1/live", { headers: adminHeaders(), signal: mine.signal });
        if (response.status === 401) {
          state("off", "locked", "This server asks for a key: the admin key, or the API key where there is no other.");
          if (!$("keys").open) $("keys").showModal();
          return;
        }
        if (!response.ok) throw new Error(await YardChat.failure(response));
        pause = 500;
        for await (const data of YardChat.events(response)) {
          const tick = JSON.parse(data);
          if (mine.signal.aborted) return;
          take(tick); phase(tick);
        }
        throw new Error("the stream ended");
      } catch (error) {
        if (mine.signal.aborted) return;
        state("off", "not connected", `The server does not answer (${error.message}); trying again.`);
        await new Promise((done) => setTimeout(done, pause));
        pause = Math.min(pause * 1.6, 5000);
      }
    }
  }

  function start() {
    Yard.initTheme($("theme"));
    makePlots();
    YardRequest.start(ask);
    YardChat.start(apiHeaders, YardRequest.open);
    $("policy-form").addEventListener("submit", setPolicy);
    for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
    $("keys-open").addEventListener("click", () => { $("key-api").value = keys.api; $("key-admin").value = keys.admin; $("keys").showModal(); });
    $("keys-form").addEventListener("submit", (event) => {
      event.preventDefault();
      Object.assign(keys, { api: $("key-api").value.trim(), admin: $("key-admin").value.trim() });
      try { sessionStorage.setItem(KEYS_AT, JSON.stringify(keys)); } catch { /* kept in memory only */ }
      $("keys").close();
      follow();
    });
    document.addEventListener("visibilitychange", () => { if (document.hidden) { if (connection) connection.abort(); } else follow(); });
    follow();
  }
  start();
})();
