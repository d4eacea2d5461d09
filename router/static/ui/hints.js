// When a hint is sent: at the first key of a message, once per turn, and never in the way of the message itself.

import * as api from "/ui/api.js";

const POLL_MS = 250;
const POLLS = 240;

export class Hints {
  // onNews(answer) is told what the router says, at once and whenever it changes; onFault(text) what went wrong.
  constructor(onNews, onFault) {
    this.onNews = onNews;
    this.onFault = onFault;
    this.enabled = true;
    this.reset();
  }

  // A turn has ended, or a conversation begins: the next key is a first one.
  reset() {
    this.turn = (this.turn ?? 0) + 1;
    this.sent = false;
  }

  async typing(session, messages, model) {
    if (!this.enabled || this.sent || messages.length === 0) return;
    this.sent = true;
    const turn = this.turn;
    try {
      let answer = await api.advise(session, messages, model);
      this.onNews(answer);
      for (let polls = 0; polls < POLLS && this.turn === turn && moving(answer); polls++) {
        await new Promise((done) => setTimeout(done, POLL_MS));
        answer = await api.advised(answer.id);
        if (this.turn === turn) this.onNews(answer);
      }
    } catch (error) {
      if (this.turn === turn) this.onFault(error);
    }
  }
}

function moving(answer) {
  return answer.id && (["deferred", "moving", "computing"].includes(answer.state));
}
