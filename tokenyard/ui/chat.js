/* The chat: streams /v1/chat/completions and shows how long the first token took and how fast the others came. */
"use strict";
const YardChat = (() => {
  const { el, number, duration } = Yard;
  const $ = (id) => document.getElementById(id);
  const history = [];
  let running = null;

  function show(role, text) {
    const body = el("div", { class: "text", text });
    const message = el("div", { class: `message ${role}` }, body);
    $("messages").append(message);
    message.scrollIntoView({ block: "end" });
    return { message, body };
  }

  function request() {
    const wanted = { messages: history, stream: true, stream_options: { include_usage: true } };
    const given = { max_tokens: $("chat-tokens").value, temperature: $("chat-temperature").value, priority: $("chat-priority").value };
    for (const [name, value] of Object.entries(given)) if (value !== "") wanted[name] = Number(value);
    if ($("chat-class").value) wanted.service_tier = $("chat-class").value;
    return wanted;
  }

  /* The data lines of a stream of server-sent events. */
  async function* events(response) {
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let held = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += decoder.decode(value, { stream: true });
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  }

  async function failure(response) {
    try {
      return (await response.json()).error.message;
    } catch {
      return `the server answered with status ${response.status}`;
    }
  }

  async function send(text, headers, explain) {
    history.push({ role: "user", content: text });
    show("user", text);
    const { message, body } = show("assistant", "");
    const state = { text: "", thought: null, id: "", first: 0, usage: null };
    const began = performance.now();
    running = new AbortController();
    busy(true);
    try {
      const response = await fetch("v1/chat/completions", {
        method: "POST", signal: running.signal, headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(request()),
      });
      if (!response.ok) throw new Error(await failure(response));
      for await (const data of events(response)) if (data !== "[DONE]") take(JSON.parse(data), state, message, body);
    } catch (error) {
      if (error.name !== "AbortError") fail(message, body, state, error.message);
    }
    running = null;
    busy(false);
    if (state.text) history.push({ role: "assistant", content: state.text });
    else if (history.length && history[history.length - 1].role === "user") history.pop();
    showTimes(message, state, began, explain);
  }

  function take(chunk, state, message, body) {
    if (chunk.error) throw new Error(chunk.error.message);
    state.id = chunk.id || state.id;
    if (chunk.usage) state.usage = chunk.usage;
    const delta = chunk.choices && chunk.choices[0] && chunk.choices[0].delta;
    if (!delta) return;
    const thought = delta.reasoning_content || delta.reasoning;
    if ((delta.content || thought) && !state.first) state.first = performance.now();
    if (thought) {
      if (!state.thought) { state.thought = el("div", { class: "thought" }); message.prepend(state.thought); }
      state.thought.textContent += thought;
    }
    if (delta.content) {
      state.text += delta.content;
      const box = $("messages");
      const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      body.textContent = state.text;
      if (atEnd) box.scrollTop = box.scrollHeight;
    }
  }

  function fail(message, body, state, why) {
    message.classList.add("failed");
    body.textContent = state.text ? `${state.text}\n\n${why}` : why;
  }

  function showTimes(message, state, began, explain) {
    if (!state.first) { if (!message.classList.contains("failed")) message.remove(); return; }
    const now = performance.now();
    const tokens = state.usage ? state.usage.completion_tokens : null;
    const parts = [`first token ${duration(state.first - began)}`];
    if (tokens > 1) parts.push(`${number((tokens - 1) / ((now - state.first) / 1000))} tokens/s`, `${tokens} tokens`);
    const line = el("div", { class: "told num" }, el("span", { text: parts.join(" · ") }));
    if (state.id) line.append(el("button", { type: "button", class: "plain", text: "explain", onclick: () => explain(state.id) }));
    message.append(line);
    line.scrollIntoView({ block: "nearest" });
  }

  function busy(yes) {
    $("chat-send").disabled = yes;
    $("chat-stop").disabled = !yes;
  }

  /* `headers()` gives those with the API key; `explain(id)` shows where a request's time went. */
  function start(headers, explain) {
    const submit = () => {
      const text = $("chat-text").value.trim();
      if (!text || running) return;
      $("chat-text").value = "";
      send(text, headers(), explain);
    };
    $("chat-form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
    $("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
    });
    $("chat-stop").addEventListener("click", () => running && running.abort());
    $("chat-clear").addEventListener("click", () => { if (running) running.abort(); history.length = 0; $("messages").replaceChildren(); $("chat-text").focus(); });
  }
  return { start, events, failure };
})();
