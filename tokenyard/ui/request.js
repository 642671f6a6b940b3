/* One request: where its time went, what it waited behind, and the controls that change it. */
"use strict";
const YardRequest = (() => {
  const { el, key, number, duration, slot } = Yard;
  const $ = (id) => document.getElementById(id);
  const STAGES = [
    ["queue", "waiting in the queue", slot(2)], ["loading", "loading KV", slot(6)], ["prefill", "prefill", slot(0)],
    ["decode", "decode", slot(1)], ["requeued", "waiting again", slot(7)], ["recompute", "computing again", slot(5)], ["paused", "paused", "other"],
  ];
  let ask = null;

  function timeline(answer) {
    const stages = answer.stages_ms;
    const total = Math.max(answer.total_ms, 0.001);
    const bar = el("div", { class: "timeline", role: "img", "aria-label": answer.summary });
    const legend = el("div", { class: "legend" });
    for (const [name, text, color] of STAGES) {
      const ms = stages[name] || 0;
      if (!ms) continue;
      const part = el("i", { title: `${text}: ${duration(ms)}` });
      part.style.background = `var(--${color})`;
      part.style.flexGrow = String(ms / total);
      bar.append(part);
      legend.append(el("span", {}, key(color), el("span", { text }), el("b", { text: duration(ms) })));
    }
    return [bar, legend];
  }

  function facts(answer) {
    const retracted = answer.retracted;
    const behind = answer.waited_behind;
    const list = el("dl", { class: "facts num" });
    const add = (name, value, wide) => list.append(el("div", { class: wide ? "wide" : undefined }, el("dt", { text: name }), el("dd", { text: value })));
    add("Prompt tokens, from the cache", `${number(answer.prompt_tokens)}, ${number(answer.cached_tokens)}`);
    add("Answer tokens", number(answer.completion_tokens));
    add("Prefill chunks", number(answer.prefill_chunks));
    add("Retracted", `${retracted.preempted} preempted, ${retracted.out_of_pages} out of pages, ${retracted.paused} paused`);
    add("Recomputed", `${number(retracted.recomputed_tokens)} tokens`);
    add("On arrival", `${number(behind.admitted_at_arrival)} were running, ${number(behind.waiting_at_arrival)} waited`);
    add("Less urgent ones were running", duration(behind.priority_inversion_ms));
    add("Policy", behind.policy || "not started yet");
    add("What may overtake it", behind.overtaking || "–", true);
    return list;
  }

  function others(title, starts) {
    if (!starts.requests) return null;
    const ids = el("div", { class: "ids" });
    for (const id of starts.latest_ids) {
      ids.append(id.startsWith("#") ? el("span", { class: "mono", text: id }) : el("button", { type: "button", class: "plain mono", text: id, onclick: () => open(id) }));
    }
    return el("div", {}, el("h3", { text: `${title}: ${number(starts.requests)} (${number(starts.tokens)} tokens to compute)` }), ids);
  }

  function answerView(answer) {
    const state = answer.finish_reason ? `ended: ${answer.finish_reason}` : answer.state;
    const view = el("div", { class: "answer" }, el("p", {}, el("b", { text: state }), ` after ${duration(answer.total_ms)}`), ...timeline(answer));
    if (answer.message) view.append(el("p", { class: "warn", text: answer.message }));
    view.append(facts(answer));
    const behind = answer.waited_behind;
    for (const part of [others("Came earlier and started first", behind.earlier), others("Came later and overtook it", behind.later)]) if (part) view.append(part);
    return view;
  }

  function controls(id, reload) {
    const status = el("span", { role: "status" });
    const input = el("input", { type: "number", step: "1", "aria-label": "Priority" });
    const run = async (method, path, body, done) => {
      const answer = await ask(method, path, body);
      status.className = answer.ok ? "good" : "bad";
      status.textContent = answer.ok ? answer.value.note || done : answer.message;
      if (answer.ok) reload();
    };
    const path = `v1/requests/${encodeURIComponent(id)}`;
    const button = (text, act) => el("button", { type: "button", text, onclick: act });
    const set = button("Set priority", () => input.value !== "" && run("PATCH", path, { priority: Number(input.value) }, "priority set"));
    return el("div", { class: "stack" }, el("h3", { text: "Change it (admin key)" }), el("div", { class: "actions" }, el("label", { text: "Priority" }, input), set,
      button("Pause", () => run("POST", `${path}/pause`, undefined, "paused")),
      button("Resume", () => run("POST", `${path}/resume`, undefined, "resumed")),
      button("Abort", () => run("POST", "abort_request", { rid: id }, "aborted")), status));
  }

  async function open(id) {
    const dialog = $("request");
    $("request-title").textContent = id;
    const body = $("request-body");
    const answers = el("div", { class: "stack" });
    const load = async () => {
      const answer = await ask("GET", `v1/requests/${encodeURIComponent(id)}/explain`);
      if (!answer.ok) { answers.replaceChildren(el("p", { class: "bad", text: answer.message })); return false; }
      answers.replaceChildren(...answer.value.answers.map(answerView));
      if (answer.value.cache) answers.append(el("p", { text: `Turn ${number(answer.value.turn)} of session ${answer.value.session}: ${answer.value.cache.summary}` }));
      return answer.value.answers.some((one) => !one.finish_reason && one.state !== "ended");
    };
    body.replaceChildren(answers);
    if (!dialog.open) dialog.showModal();
    const open_ = await load();
    if ($("request-title").textContent !== id) return;
    if (open_) {
      body.append(controls(id, load));
      const timer = setInterval(async () => {
        if (!dialog.open || $("request-title").textContent !== id || !(await load())) clearInterval(timer);
      }, 1000);
    }
  }

  /* `askServer(method, path, body)` answers {ok, value, message}. */
  function start(askServer) { ask = askServer; }
  return { start, open };
})();
