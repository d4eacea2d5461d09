// Hints that take no time: announce which request comes next, without waiting for the router.

import { Connection } from "./connection.js";
import type { Hint, HintOptions } from "./types.js";

/** Hints that wait to be sent; the oldest goes, because the newest is worth most. */
export const MOST_WAITING = 256;
const TIMEOUT_MS = 5000;

/** A hint that was given. */
export class Announcement {
  /** The router's name of it, once it has answered. */
  id: string | undefined;
  readonly #withdraw: (announced: Announcement) => void;

  constructor(
    readonly hint: HintOptions,
    withdraw: (announced: Announcement) => void,
  ) {
    this.#withdraw = withdraw;
  }

  /** The request will not come. Returns at once. */
  withdraw(): void {
    this.#withdraw(this);
  }
}

/**
 * Sends hints to a router, one after the other, behind the program's back. A program never fails or waits because of a hint: one
 * that cannot be sent is dropped and counted, and the first is reported.
 */
export class Hints {
  sent = 0;
  withdrawn = 0;
  dropped = 0;
  readonly #connection: Connection;
  readonly #report: (reason: string) => void;
  readonly #waiting: ["POST" | "DELETE", Announcement][] = [];
  #sending: Promise<void> | undefined;
  #closed = false;
  #reported = false;

  /**
   * @param url of the router
   * @param options.report gets the reason for which the first hint was dropped; `console.warn` by default
   * @throws TypeError where the URL is not of the form `http://host:port`
   */
  constructor(url: string, options: { apiKey?: string; report?: (reason: string) => void } = {}) {
    this.#connection = new Connection(url, options.apiKey);
    this.#report = options.report ?? ((reason) => console.warn(`a hint was not taken: ${reason}`));
  }

  /** Announces a request of a session, or one that continues a conversation. Returns at once. */
  hint(hint: HintOptions): Announcement {
    const announced = new Announcement(hint, (each) => this.#withdraw(each));
    this.#put("POST", announced);
    return announced;
  }

  /** Sends the hints that wait; later ones are not sent. */
  async close(): Promise<void> {
    this.#closed = true;
    await this.#sending;
  }

  #withdraw(announced: Announcement): void {
    const at = this.#waiting.findIndex(([method, each]) => method === "POST" && each === announced);
    if (at >= 0) this.#waiting.splice(at, 1);
    else this.#put("DELETE", announced);
  }

  #put(method: "POST" | "DELETE", announced: Announcement): void {
    if (this.#closed) return;
    if (this.#waiting.length >= MOST_WAITING) {
      this.#waiting.shift();
      this.dropped += 1;
    }
    this.#waiting.push([method, announced]);
    this.#sending ??= this.#main();
  }

  async #main(): Promise<void> {
    await Promise.resolve(); // the program goes on first
    for (let next = this.#waiting.shift(); next !== undefined; next = this.#waiting.shift()) {
      const [method, announced] = next;
      try {
        if (method === "POST") {
          announced.id = (await this.#connection.call<Hint>("POST", "/v1/advisory", announced.hint, TIMEOUT_MS)).id;
          this.sent += 1;
        } else if (announced.id !== undefined) {
          const path = `/v1/advisory/${encodeURIComponent(announced.id)}`;
          await this.#connection.call("DELETE", path, undefined, TIMEOUT_MS);
          this.withdrawn += 1;
        }
      } catch (error) {
        this.dropped += 1;
        if (!this.#reported) this.#report(String(error));
        this.#reported = true;
      }
    }
    this.#sending = undefined;
  }
}

/** While the work goes on, has the KV brought up for the request that comes after it. Where the work fails, the request will not
 * come, and the hint is taken back. */
export async function advise<T>(hints: Hints, hint: HintOptions, work: () => T | Promise<T>): Promise<T> {
  const announced = hints.hint(hint);
  try {
    return await work();
  } catch (error) {
    announced.withdraw();
    throw error;
  }
}
