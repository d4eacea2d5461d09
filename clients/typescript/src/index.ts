// A router's own API for TypeScript programs: hints, documents, sessions, confirmations of answers, explanations.

export { Client, Session, confirmation } from "./client.js";
export type { ClientOptions } from "./client.js";
export { Announcement, Hints, advise } from "./hints.js";
export { RouterError } from "./connection.js";
export type {
  Confirmation,
  Content,
  Divergence,
  Document,
  DocumentOptions,
  Explanation,
  Hint,
  HintOptions,
  Message,
  SessionHint,
} from "./types.js";
