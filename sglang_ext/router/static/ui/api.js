// What the page asks of the router. Every call answers or throws an Error that a person can read.

const KEY = "router-key";

export class KeyNeeded extends Error {}

export function remember(key) {
  sessionStorage.setItem(KEY, key);
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...more };
}

async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.status === 401) throw new KeyNeeded("This router asks for a key.");
  if (!response.ok) {
    let text = `${response.status} ${response.statusText}`;
    try {
      text = (await response.json()).error.message;
    } catch { /* no JSON: the status has to do */ }
    throw new Error(text);
  }
  return response;
}

function post(path, body, options = {}) {
  return call(path, {
    method: "POST",
    body: JSON.stringify(body),
    ...options,
    headers: { "content-type": "application/json", ...options.headers },
  });
}

export async function models() {
  return (await (await call("/v1/models")).json()).data;
}

export async function cluster() {
  return (await call("/cluster")).json();
}

// Samples of /metrics: [{name, labels, value}].
export async function metrics() {
  const samples = [];
  for (const line of (await (await call("/metrics")).text()).split("\n")) {
    const found = /^(\w+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));
    }
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

// The router's last hour: {every_s, samples: [{ago_s, running, …}], cached}.
export async function lastHour() {
  return (await call("/metrics/last_hour")).json();
}

export async function advise(session, messages, model) {
  return (await post("/v1/advisory", { session, messages, model })).json();
}

// Calls `onState` with each state of a hint, the last being the one in which nothing is moved any more.
export async function follow(id, onState, signal) {
  const path = `/v1/advisory/${encodeURIComponent(id)}`;
  const response = await call(path, { headers: { accept: "text/event-stream" }, signal });
  for await (const state of events(response.body)) onState(state);
}

// Streams one turn. `onText` gets each piece; resolves with what the answer told about itself.
export async function say(session, messages, model, onText, signal) {
  const started = performance.now();
  const response = await post(
    "/v1/chat/completions",
    { model, messages, stream: true, stream_options: { include_usage: true } },
    { headers: { "x-session-id": session }, signal },
  );
  const told = { instance: response.headers.get("x-kv-instance"), ttft: null, text: "", usage: null };
  for await (const part of events(response.body)) {
    if (part.error) throw new Error(part.error.message);
    if (part.usage) told.usage = part.usage;
    const text = part.choices?.[0]?.delta?.content;
    if (text) {
      told.ttft ??= performance.now() - started;
      told.text += text;
      onText(told.text);
    }
  }
  return told;
}

// The server-sent events of a body, parsed; without the mark of the end.
async function* events(body) {
  let rest = "";
  const decoder = new TextDecoder();
  for await (const bytes of pieces(body)) {
    rest += decoder.decode(bytes, { stream: true });
    const whole = rest.split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n").trim();
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function* pieces(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.releaseLock();
  }
}
