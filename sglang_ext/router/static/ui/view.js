// What is drawn. No state of its own; all text goes in as text, never as HTML.

// Tiers come nearest first, under their names.
const LABELS = { hbm: "HBM", dram: "DRAM", elsewhere: "another instance", nowhere: "to be computed" };

export function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

export function message(role, text) {
  const node = element("article", `message ${role}`);
  const body = element("div", "text", text);
  const foot = element("footer");
  node.append(body, foot);
  return { node, body, foot };
}

export function where(stack, legend, tokens) {
  stack.replaceChildren();
  legend.replaceChildren();
  for (const [name, count] of Object.entries(tokens ?? {})) {
    if (!count) continue;
    const label = LABELS[name] ?? name;
    const part = element("span", `held ${name}`);
    part.style.flexGrow = count;
    part.title = `${label}: ${count} tokens`;
    stack.append(part);
    const item = element("li", "", `${label} ${count}`);
    item.prepend(element("i", `held ${name}`));
    legend.append(item);
  }
}

export function hint(answer, ms) {
  const at = answer.instance ? ` at ${answer.instance}` : "";
  const state = answer.state ?? answer.verdict;
  const why = answer.why ?? answer.reason;
  return `Hint ${state}${at}${why ? ` (${why})` : ""}, ${ms.toFixed(0)} ms after the key`;
}

export function turns(chart, rows) {
  const most = Math.max(...rows.map((row) => row.ttft), 1);
  chart.replaceChildren(
    ...rows.map((row, index) => {
      const bar = element("span", row.hinted ? "with" : "without");
      bar.style.height = `${Math.max(2, (100 * row.ttft) / most)}%`;
      bar.title = `turn ${index + 1}: ${row.ttft.toFixed(0)} ms, ${row.cached} of ${row.prompt} tokens cached`;
      return bar;
    }),
  );
}

export function instances(list, rows, chosen) {
  list.replaceChildren(...rows.map((row) => card(row, row.instance === chosen || row.url === chosen)));
}

function card(row, here) {
  const box = element("div", `instance state-${row.state}${here ? " chosen" : ""}`);
  const head = element("h3", "", row.instance);
  head.append(element("span", "quiet", `${row.state}, ${row.in_flight} running`));
  box.append(head);
  for (const [name, fill] of Object.entries(row.tiers ?? {})) {
    if (!fill.size) continue;
    const line = element("div", "tier");
    const meter = element("meter");
    meter.max = fill.size;
    meter.value = fill.used;
    meter.title = `${fill.used} of ${fill.size} blocks`;
    line.append(element("span", "", label(name)), meter, element("span", "", `${Math.round((100 * fill.used) / fill.size)} %`));
    box.append(line);
  }
  return box;
}

// As `instances`, with what the operators of a cluster look at.
export function cards(list, rows) {
  list.replaceChildren(
    ...rows.map((row) => {
      const box = card(row, false);
      const index = row.awaited ? "index awaited" : row.trusted ? "index trusted" : "index not trusted";
      const facts = [`${row.queued_tokens} tokens queued`, `${row.cached_tokens} cached`, row.usable ? index : row.why];
      box.firstChild.after(element("span", "role", row.role), element("p", "facts", facts.join(", ")));
      return box;
    }),
  );
}

export const label = (tier) => LABELS[tier] ?? tier;

// A bar of parts [className, label, count], and what each part is.
export function parts(stack, legend, rows, text) {
  stack.replaceChildren();
  legend.replaceChildren();
  for (const [name, title, count] of rows) {
    if (!count) continue;
    const part = element("span", `held ${name}`);
    part.style.flexGrow = count;
    const item = element("li", "", `${title} ${text(count)}`);
    part.title = item.textContent;
    item.prepend(element("i", `held ${name}`));
    stack.append(part);
    legend.append(item);
  }
}

// A line of the last values, the newest at the right.
// A curve of {at, value}, `at` in ms, over the last hour or as much of it as there is.
export function spark(series) {
  const svg = document.getElementById("spark").content.firstElementChild.cloneNode(true);
  const most = Math.max(...series.map((each) => each.value), 1e-9);
  const last = series[series.length - 1].at;
  const span = Math.max(last - series[0].at, 120000);
  const points = series.map(({ at, value }) => `${119 - (119 * (last - at)) / span},${19 - (18 * value) / most}`);
  svg.firstElementChild.setAttribute("points", points.join(" "));
  return svg;
}
