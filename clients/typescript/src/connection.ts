// One call of a router.

/** A router refused a call. */
export class RouterError extends Error {
  /**
   * @param status of the HTTP answer
   * @param code the router's word for the reason, such as `unknown_session`
   * @param reason a sentence
   * @param retryAfterS seconds after which to try again, where the router names them
   */
  constructor(
    readonly status: number,
    readonly code: string | null,
    readonly reason: string,
    readonly retryAfterS: number | null,
  ) {
    super(`${status}${code === null ? "" : ` ${code}`}: ${reason}`);
    this.name = "RouterError";
  }
}

/** A router's address, and the headers of all calls. */
export class Connection {
  readonly #base: string;
  readonly #headers: Record<string, string>;

  /**
   * @param url `http://host:port`, or with `https` and a path in front of the router's own
   * @param apiKey where the router asks for one
   * @throws TypeError where the URL is none
   */
  constructor(url: string, apiKey?: string) {
    if (!/^https?:\/\/[^/]/.test(url)) throw new TypeError(`${JSON.stringify(url)} is not of the form http://host:port`);
    this.#base = new URL(url).href.replace(/\/+$/, "");
    this.#headers = { "content-type": "application/json" };
    if (apiKey) this.#headers["authorization"] = `Bearer ${apiKey}`;
  }

  /**
   * The JSON of an answer; `null` for an empty one.
   *
   * @param timeoutMs the longest wait for the whole answer
   * @throws RouterError where the router refuses; what `fetch` throws where it cannot be reached or is late
   */
  async call<T>(method: string, path: string, body: unknown, timeoutMs: number): Promise<T> {
    const response = await fetch(this.#base + path, {
      method,
      headers: this.#headers,
      signal: AbortSignal.timeout(timeoutMs),
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
    const text = await response.text();
    if (response.status !== 200) throw refusal(response.status, text, response.headers.get("retry-after"));
    return (text === "" ? null : JSON.parse(text)) as T;
  }
}

function refusal(status: number, text: string, retryAfter: string | null): RouterError {
  const wait = retryAfter !== null && /^\d+$/.test(retryAfter) ? Number(retryAfter) : null;
  try {
    const { code, message } = (JSON.parse(text) as { error: { code?: string; message: string } }).error;
    return new RouterError(status, code ?? null, message, wait);
  } catch {
    return new RouterError(status, null, text.slice(0, 200), wait);
  }
}
