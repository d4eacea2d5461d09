// The JSON of a router. Routers may add keys; a key that a router leaves out is absent.

export type Message = { role: string; content: unknown; [field: string]: unknown };

/** A prompt, in one of three forms. */
export interface Content {
  messages?: readonly Message[];
  text?: string;
  input_ids?: readonly number[];
}

/** The announcement of a request. */
export interface HintOptions extends Content {
  /** As requests name it; alone, it means the conversation that the session has had. */
  session?: string;
  /** Seconds from now before which the request does not come. */
  earliest_s?: number;
  /** Seconds after that in which it may come. */
  ttl_s?: number;
  /** The request's. */
  priority?: number;
}

export type SessionHint = Omit<HintOptions, "session">;

/** A document to register; one of the forms of its content is given. */
export interface DocumentOptions extends Content {
  /** Seconds that it lives. */
  ttl_s?: number;
  /** At how many instances its KV is held back. */
  instances?: number;
  /** The `extra_key` of the requests that will name it. */
  extra_key?: string;
  /** Against other announced KV. */
  priority?: number;
}

/** A hint's state. Tokens are the prompt's, by tier; seconds count from now. */
export interface Hint {
  id: string;
  /** In the answer to a new hint only. */
  verdict?: "accepted" | "clipped" | "deferred";
  state: string;
  why: string | null;
  instance: string | null;
  decode: string | null;
  session: boolean;
  tokens: Record<string, number>;
  moved_tokens: number;
  decode_moved_tokens: number | null;
  computed_tokens: number;
  earliest_in_s: number;
  expires_in_s: number;
  ready_after_s: number | null;
}

/** A registered document, with the instances that hold its KV back. */
export interface Document {
  id: string;
  kind: "text" | "input_ids" | "messages";
  tokens: number | null;
  blocks: number;
  expires_in_s: number;
  requests: number;
  why_not_held_back: string | null;
  instances: Record<string, { held_back: boolean; tokens: Record<string, number> }>;
}

/** Where a turn left the tokens of its session's last turn. */
export interface Divergence {
  at: number;
  cause: string;
  lost_tokens: number;
  rule: string | null;
  /** The words there, and all of it in a sentence: for the key that sent the request. */
  before?: string;
  after?: string;
  text?: string;
}

/** Why a request hit or missed. */
export interface Explanation {
  request_id: string;
  answer_id: string | null;
  endpoint: string;
  tenant: string | null;
  status: number;
  causes: string[];
  prompt: { tokens: number | null; [key: string]: unknown };
  divergence: Divergence | null;
  repairs: { rule: string; changes: number }[];
  cached: { tokens: number | null; tiers: Record<string, number> | null };
  documents: { ids: string[]; tokens: number; cached_tokens: number } | null;
  durability: string | null;
  routing: Record<string, unknown>[];
  evictions: Record<string, unknown>[] | null;
  spilled: Record<string, unknown>[];
  seconds: Record<string, unknown>;
  error: string | null;
}

/** How the end of an answer was reported by a server with `--kv-durability acked`. */
export interface Confirmation {
  /** `durable`, `behind`, `late`, `refused`, `lost` or `uncached`. */
  end: string;
  /** Whether the KV of the conversation so far was on disk before the answer ended. */
  durable: boolean;
}
