// The cluster page: what /cluster and /metrics tell, and how it changes from one look to the next.

import * as api from "/ui/api.js";
import * as view from "/ui/view.js";

const LOOK_MS = 1000;
const HOUR_MS = 3600000;
const HINTS = { ready: "kept: all was there", early: "early: still on its way", never: "missed: no request came" };
const KINDS = { ready: "ready", early: "on-its-way", never: "never" };
const at = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

const past = { at: 0, samples: [], series: {}, hour: null, hourAt: 0 };

// The sum of a metric's samples whose labels have all of `wanted`.
function sum(samples, name, wanted = {}) {
  return samples
    .filter((each) => each.name === `sglang_ext_router_${name}`)
    .filter((each) => Object.entries(wanted).every(([label, value]) => each.labels[label] === value))
    .reduce((total, each) => total + each.value, 0);
}

function by(samples, name, label) {
  const found = {};
  for (const each of samples) {
    if (each.name === `sglang_ext_router_${name}`) found[each.labels[label]] = (found[each.labels[label]] ?? 0) + each.value;
  }
  return found;
}

// How much a counter has grown per second since the last look.
function rate(samples, seconds, name, wanted) {
  if (!past.samples.length || seconds <= 0) return 0;
  return Math.max(0, sum(samples, name, wanted) - sum(past.samples, name, wanted)) / seconds;
}

function tile(name, text, value) {
  const box = view.element("div", "tile");
  box.append(view.element("b", "", text), view.element("span", "", name));
  if (value !== undefined) box.append(view.spark(remember(name, value)));
  return box;
}

// Looks are kept until the router's next sample replaces them.
function remember(name, value) {
  const now = performance.now();
  const series = (past.series[name] ??= []);
  series.push({ at: now, value });
  while (series[0].at < now - HOUR_MS) series.shift();
  return series;
}

// The curves begin with the router's last hour. A rate is the difference of two samples.
function begin({ samples, every_s: every }) {
  const now = performance.now();
  const level = (name) => samples.map((each) => ({ at: now - 1000 * each.ago_s, value: each[name] }));
  const rates = (name) =>
    samples.slice(1).map((each, before) => {
      const seconds = samples[before].ago_s - each.ago_s || every;
      return { at: now - 1000 * each.ago_s, value: Math.max(0, each[name] - samples[before][name]) / seconds };
    });
  past.series = {
    "requests running": level("running"),
    "waiting in the queue": level("waiting"),
    "requests/s": rates("requests"),
    "generated tokens/s": rates("generated"),
  };
}

async function hour() {
  const now = performance.now();
  if (past.hour && now - past.hourAt < 1000 * past.hour.every_s) return;
  past.hour = await api.lastHour();
  past.hourAt = now;
  begin(past.hour);
}

function regret() {
  const found = past.hour?.cached;
  if (!found) return [];
  const share = (value) => (value === null ? "–" : percent(value, 1));
  return [
    tile("cached in the last hour", share(found.hit)),
    tile("an oracle of that capacity", share(found.oracle)),
    tile("a cache without a limit", share(found.unlimited)),
  ];
}

function tiles(cluster, samples, seconds) {
  const running = cluster.instances.reduce((total, row) => total + row.in_flight, 0);
  const usable = cluster.instances.filter((row) => row.usable).length;
  const requests = rate(samples, seconds, "requests_total", {});
  const generated = rate(samples, seconds, "completion_tokens_total");
  const waiting = sum(samples, "queue_waiting");
  const prompt = sum(samples, "prompt_tokens_total");
  at("tiles").replaceChildren(
    tile("instances usable", `${usable} of ${cluster.instances.length}`),
    tile("requests running", number.format(running), running),
    tile("waiting in the queue", number.format(waiting), waiting),
    tile("requests/s", number.format(requests), requests),
    tile("generated tokens/s", number.format(generated), generated),
    tile("prompt tokens cached", percent(sum(samples, "cached_tokens_total"), prompt)),
    ...regret(),
  );
}

function cached(samples) {
  const tiers = by(samples, "tier_tokens_total", "tier");
  const prompt = sum(samples, "prompt_tokens_total");
  const all = sum(samples, "cached_tokens_total");
  const told = Object.values(tiers).reduce((total, count) => total + count, 0);
  const parts = Object.entries(tiers).map(([tier, count]) => [tier, view.label(tier), count]);
  if (all > told) parts.push(["elsewhere", "cached, tier unknown", all - told]);
  parts.push(["nowhere", "computed", Math.max(0, prompt - Math.max(all, told))]);
  view.parts(at("cached"), at("cached-legend"), parts, (count) => `${number.format(count)} (${percent(count, prompt)})`);
}

function hints(samples) {
  const used = by(samples, "hints_used_total", "when");
  const all = Object.values(used).reduce((total, count) => total + count, 0);
  const parts = Object.entries(used).map(([when, count]) => [KINDS[when] ?? "nowhere", HINTS[when] ?? when, count]);
  view.parts(at("hints"), at("hints-legend"), parts, (count) => `${number.format(count)} (${percent(count, all)})`);
  if (!all) at("hints-legend").append(view.element("li", "", "none has ended yet"));
}

function transfers(samples, seconds, names) {
  const rows = samples
    .filter((each) => each.name === "sglang_ext_router_transferred_tokens_total" && each.value)
    .sort((one, other) => other.value - one.value)
    .slice(0, 50);
  const most = Math.max(...rows.map((row) => row.value), 1);
  at("no-transfers").hidden = rows.length > 0;
  at("transfers").hidden = !rows.length;
  at("transfers").tBodies[0].replaceChildren(
    ...rows.map(({ labels, value }) => {
      const row = view.element("tr");
      const now = rate(samples, seconds, "transferred_tokens_total", labels);
      const bar = view.element("div", "stack");
      const held = view.element("span", "hbm");
      held.style.flexGrow = value;
      const rest = view.element("span", "nowhere");
      rest.style.flexGrow = most - value;
      bar.append(held, rest);
      const last = view.element("td");
      last.append(bar);
      row.append(
        ...[labels.source, labels.target].map((url) => view.element("td", "", names[url] ?? url)),
        view.element("td", "", labels.how),
        view.element("td", "number", number.format(value)),
        view.element("td", "number", number.format(now)),
        last,
      );
      return row;
    }),
  );
}

async function look() {
  try {
    const [cluster, samples] = await Promise.all([api.cluster(), api.metrics(), hour()]);
    const now = performance.now();
    const seconds = (now - past.at) / 1000;
    at("router").textContent = `${cluster.router}${cluster.routers.length > 1 ? `, one of ${cluster.routers.length} routers` : ""}`;
    tiles(cluster, samples, seconds);
    cached(samples);
    hints(samples);
    view.cards(at("instances"), cluster.instances);
    at("incompatible").replaceChildren(...(cluster.incompatible ?? []).map((each) => view.element("li", "", each.why)));
    transfers(samples, seconds, Object.fromEntries(cluster.instances.map((row) => [row.url, row.instance])));
    Object.assign(past, { at: now, samples });
    at("notice").textContent = cluster.unusable ?? "";
  } catch (error) {
    at("notice").textContent = error.message;
    if (error instanceof api.KeyNeeded) {
      if (!at("login").open) at("login").showModal();
      return;
    }
  }
  setTimeout(look, LOOK_MS);
}

at("login").addEventListener("close", () => {
  api.remember(at("key").value);
  look();
});
look();
