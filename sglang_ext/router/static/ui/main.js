// The page: one conversation, and what the cluster does with it.

import * as api from "/ui/api.js";
import { Hints } from "/ui/hints.js";
import * as view from "/ui/view.js";

const CLUSTER_MS = 1000;
const at = (id) => document.getElementById(id);

const state = { session: crypto.randomUUID(), messages: [], turns: [], model: undefined, chosen: null, busy: null };

const hints = new Hints(
  (answer, ms) => {
    at("hint").textContent = view.hint(answer, ms);
    view.where(at("where"), at("legend"), answer.tokens);
    state.hinted = answer.verdict !== "refused";
    if (answer.instance) state.chosen = answer.instance;
  },
  (error) => {
    at("hint").textContent = `The hint was not taken: ${error.message}`;
  },
);

function begin() {
  state.busy?.abort();
  Object.assign(state, { session: crypto.randomUUID(), messages: [], turns: [], chosen: null, hinted: false });
  hints.reset();
  at("messages").replaceChildren();
  at("hint").textContent = "No hint yet: it is sent at the first key.";
  view.where(at("where"), at("legend"), null);
  view.turns(at("turns"), []);
  at("notice").textContent = "";
  at("draft").focus();
}

async function send(text) {
  const asked = view.message("user", text);
  const answer = view.message("assistant", "");
  at("messages").append(asked.node, answer.node);
  const messages = [...state.messages, { role: "user", content: text }];
  const hinted = state.hinted ?? false;
  const busy = (state.busy = new AbortController());
  at("send").disabled = true;
  at("notice").textContent = "";
  try {
    const told = await api.say(state.session, messages, state.model, (so_far) => {
      answer.body.textContent = so_far;
      at("messages").scrollTop = at("messages").scrollHeight;
    }, busy.signal);
    if (state.busy !== busy) return;
    state.messages = [...messages, { role: "assistant", content: told.text }];
    const prompt = told.usage?.prompt_tokens ?? 0;
    const cached = told.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    state.chosen = told.instance;
    if (told.ttft !== null) {
      state.turns.push({ ttft: told.ttft, hinted, prompt, cached });
      answer.foot.textContent = `${told.ttft.toFixed(0)} ms to the first token, ${cached} of ${prompt} tokens cached, ${told.instance ?? ""}`;
    }
    view.turns(at("turns"), state.turns);
  } catch (error) {
    if (error.name === "AbortError") return;
    answer.node.classList.add("failed");
    answer.foot.textContent = "no answer";
    at("notice").textContent = error.message;
    if (error instanceof api.KeyNeeded) at("login").showModal();
    if (!at("draft").value) at("draft").value = text;
  } finally {
    if (state.busy === busy) {
      state.busy = null;
      state.hinted = false;
      hints.reset();
      at("send").disabled = false;
    }
  }
}

at("draft").addEventListener("input", (event) => {
  const draft = at("draft");
  draft.style.height = "auto";
  draft.style.height = `${draft.scrollHeight}px`;
  if (draft.value && !state.busy) hints.typing(state.session, state.messages, state.model, event.timeStamp);
});

at("draft").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("composer").requestSubmit();
  }
});

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("draft").value.trim();
  if (!text || state.busy) return;
  at("draft").value = "";
  at("draft").style.height = "auto";
  send(text);
});

at("hints").addEventListener("change", () => {
  hints.enabled = at("hints").checked;
});
at("new").addEventListener("click", begin);
at("login").addEventListener("close", () => {
  api.remember(at("key").value);
  start();
});

async function watch() {
  try {
    view.instances(at("instances"), (await api.cluster()).instances, state.chosen);
  } catch (error) {
    at("instances").replaceChildren(view.element("p", "quiet", `Nothing is known of the instances: ${error.message}`));
  }
  setTimeout(watch, CLUSTER_MS);
}

async function start() {
  try {
    state.model = (await api.models())[0]?.id;
    at("model").textContent = state.model ?? "";
    at("notice").textContent = "";
  } catch (error) {
    if (error instanceof api.KeyNeeded) at("login").showModal();
    else at("notice").textContent = error.message;
  }
}

start();
watch();
