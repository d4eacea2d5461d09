// When a hint is sent: at the first key of a message, once per turn, and never in the way of the message itself.

import * as api from "/ui/api.js";

export class Hints {
  // onNews(answer, ms) is told what the router says, at once and whenever it changes, and how long after the key that
  // was; onFault(text) what went wrong.
  constructor(onNews, onFault) {
    this.onNews = onNews;
    this.onFault = onFault;
    this.enabled = true;
    this.reset();
  }

  // A turn has ended, or a conversation begins: the next key is a first one.
  reset() {
    this.following?.abort();
    this.following = new AbortController();
    this.sent = false;
  }

  // `typedAt` is the moment of the key, on the clock of performance.now().
  async typing(session, messages, model, typedAt) {
    if (!this.enabled || this.sent || messages.length === 0) return;
    this.sent = true;
    const { signal } = this.following;
    const news = (answer) => {
      if (!signal.aborted) this.onNews(answer, performance.now() - typedAt);
    };
    try {
      const answer = await api.advise(session, messages, model);
      news(answer);
      if (moving(answer) && !signal.aborted) await api.follow(answer.id, news, signal);
    } catch (error) {
      if (!signal.aborted) this.onFault(error);
    }
  }
}

function moving(answer) {
  return answer.id && (["deferred", "moving", "computing"].includes(answer.state));
}
