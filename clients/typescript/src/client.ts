// Calls of a router's own API, each of which waits for its answer.

import { Connection } from "./connection.js";
import type {
  Confirmation,
  Document,
  DocumentOptions,
  Explanation,
  Hint,
  HintOptions,
  SessionHint,
} from "./types.js";

export interface ClientOptions {
  apiKey?: string;
  /** The longest wait for an answer; 30,000 by default. */
  timeoutMs?: number;
}

/** The confirmation in an answer of `/v1/chat/completions`, `/v1/completions` or `/generate` in one piece; `null` where its
 * server does not wait for its disk. Of others, see `Client.confirmation`. */
export function confirmation(answer: object): Confirmation | null {
  type Holder = { cached_tokens_details?: { durability_end?: unknown } | null } | null;
  const { sglext, meta_info } = answer as { sglext?: Holder; meta_info?: Holder };
  const end = (sglext ?? meta_info)?.cached_tokens_details?.durability_end;
  return typeof end === "string" ? confirmed(end) : null;
}

function confirmed(end: string): Confirmation {
  return { end, durable: end === "durable" };
}

/** A session by the name that its requests carry. */
export class Session {
  readonly #client: Client;

  constructor(
    client: Client,
    readonly name: string,
  ) {
    if (name === "") throw new TypeError("a session's name is not empty");
    this.#client = client;
  }

  /** For each request of the session: `headers` or `defaultHeaders` of client libraries. */
  get headers(): Record<string, string> {
    return { "x-session-id": this.name };
  }

  /** Announces the session's next request. */
  hint(hint: SessionHint = {}): Promise<Hint> {
    return this.#client.hint({ ...hint, session: this.name });
  }
}

/** A router's own API. */
export class Client {
  readonly #connection: Connection;
  readonly #timeoutMs: number;

  /** @throws TypeError where the URL is not of the form `http://host:port` */
  constructor(url: string, options: ClientOptions = {}) {
    this.#connection = new Connection(url, options.apiKey);
    this.#timeoutMs = options.timeoutMs ?? 30_000;
  }

  /** Announces a request. Refused with 429 where a limit is used up, with 404 where the session is unknown and no conversation
   * is given. */
  hint(hint: HintOptions): Promise<Hint> {
    return this.#call("POST", "/v1/advisory", hint);
  }

  /** A hint's state, once it is ready or has ended, or after `waitS` seconds (0 to 60). */
  hintState(id: string, waitS = 0): Promise<Hint> {
    const query = waitS > 0 ? `?wait_s=${waitS}` : "";
    return this.#call("GET", `/v1/advisory/${encodeURIComponent(id)}${query}`, undefined, waitS * 1000);
  }

  /** Takes a hint back: its request will not come. */
  withdraw(id: string): Promise<Hint> {
    return this.#call("DELETE", `/v1/advisory/${encodeURIComponent(id)}`);
  }

  /** Registers a named beginning of prompts, whose KV is held back. Requests name it in `document_ids`. */
  putDocument(id: string, document: DocumentOptions): Promise<Document> {
    return this.#call("PUT", `/v1/documents/${encodeURIComponent(id)}`, document);
  }

  /** A document, where its KV is held back, and in which tiers it is. */
  document(id: string): Promise<Document> {
    return this.#call("GET", `/v1/documents/${encodeURIComponent(id)}`);
  }

  /** The documents of this key's tenant. */
  async documents(): Promise<Document[]> {
    return (await this.#call<{ data: Document[] }>("GET", "/v1/documents")).data;
  }

  async deleteDocument(id: string): Promise<void> {
    await this.#call("DELETE", `/v1/documents/${encodeURIComponent(id)}`);
  }

  /** A session by a name that the program chooses; nothing is sent. */
  session(name: string): Session {
    return new Session(this, name);
  }

  /** Opens one of SGLang's sessions, for `session_params` of `/generate`, and returns its name. */
  openSession(session: { capacity_of_str_len: number; session_id?: string; timeout?: number }): Promise<string> {
    return this.#call("POST", "/open_session", session);
  }

  async closeSession(sessionId: string): Promise<void> {
    await this.#call("POST", "/close_session", { session_id: sessionId });
  }

  /** Why a request hit or missed, by the header `x-request-id` of the request or its answer, or by the answer's `id`. */
  explain(requestId: string): Promise<Explanation> {
    return this.#call("GET", `/explain/${encodeURIComponent(requestId)}`);
  }

  /** How the end of an answer was reported, of a stream too; `null` where its server does not wait for its disk. */
  async confirmation(requestId: string): Promise<Confirmation | null> {
    const end = (await this.explain(requestId)).durability;
    return end === null ? null : confirmed(end);
  }

  #call<T>(method: string, path: string, body?: unknown, moreMs = 0): Promise<T> {
    return this.#connection.call<T>(method, path, body, this.#timeoutMs + moreMs);
  }
}
