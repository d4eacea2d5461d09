// Before a real router: ROUTER_URL, which asks for ROUTER_KEY. Its server reports each end as ROUTER_END.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Client, RouterError, confirmation } from "../src/index.js";

const url = process.env["ROUTER_URL"] ?? "";
const apiKey = process.env["ROUTER_KEY"] ?? "";
const client = new Client(`${url}/`, { apiKey });
const MANUAL = "You know this manual. " + "Open the valve by a quarter turn, and wait. ".repeat(12);

async function chat(more: object, headers: Record<string, string> = {}): Promise<Response> {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${apiKey}`, ...headers },
    body: JSON.stringify({ model: "default", max_tokens: 4, messages: [{ role: "user", content: "Hello" }], ...more }),
  });
  assert.equal(response.status, 200);
  return response;
}

function refused(status: number, code?: string) {
  return (error: unknown) =>
    error instanceof RouterError && error.status === status && (code === undefined || error.code === code);
}

test("a hint from its announcement to its end", async () => {
  const taken = await client.hint({ text: MANUAL, session: "writer", ttl_s: 60, priority: 1 });
  assert.equal(taken.verdict, "accepted");
  const ready = await client.hintState(taken.id, 20);
  assert.equal(ready.state, "ready");
  assert.ok(Object.values(ready.tokens).reduce((sum, count) => sum + count, 0) > 50);
  assert.equal((await client.session("writer").hint({ text: MANUAL })).id, taken.id);
  assert.equal((await client.withdraw(taken.id)).state, "cancelled");
});

test("documents are registered, named, listed and deleted", async () => {
  const put = await client.putDocument("manual", { messages: [{ role: "system", content: MANUAL }], ttl_s: 600 });
  assert.equal(put.kind, "messages");
  await client.putDocument("numbers", { input_ids: [5, 6, 7], instances: 1 });
  const answer = (await (await chat({ document_ids: ["manual"] })).json()) as { usage: { prompt_tokens: number } };
  assert.ok(answer.usage.prompt_tokens > (put.tokens ?? Infinity));
  assert.equal((await client.document("manual")).requests, 1);
  assert.deepEqual(new Set((await client.documents()).map(({ id }) => id)), new Set(["manual", "numbers"]));
  await client.deleteDocument("manual");
  await assert.rejects(client.document("manual"), refused(404));
  await client.deleteDocument("numbers");
});

test("a session's headers name it", async () => {
  const session = client.session("reader");
  await chat({}, session.headers);
  assert.equal((await session.hint({ earliest_s: 1 })).verdict, "accepted");
  await assert.rejects(client.session("never seen").hint(), refused(404, "unknown_session"));
  assert.throws(() => client.session(""), TypeError);
});

test("sessions of SGLang are opened and closed", async () => {
  assert.equal(await client.openSession({ capacity_of_str_len: 1000, session_id: "mine", timeout: 30 }), "mine");
  await client.closeSession("mine");
});

test("answers are confirmed and explained", async () => {
  const response = await chat({});
  const answer = (await response.json()) as { id: string; usage: { prompt_tokens: number } };
  const id = response.headers.get("x-request-id") ?? "";
  const end = process.env["ROUTER_END"];
  const expected = end ? { end, durable: end === "durable" } : null;
  assert.deepEqual(confirmation(answer), expected);
  assert.deepEqual(await client.confirmation(id), expected);
  const explained = await client.explain(answer.id);
  assert.equal(explained.request_id, id);
  assert.equal(explained.prompt.tokens, answer.usage.prompt_tokens);
  await assert.rejects(client.explain("no/such request?"), refused(404));
  await (await chat({ stream: true }, { "x-request-id": "streamed" })).text();
  assert.deepEqual(await client.confirmation("streamed"), expected);
});

test("refusals have the router's words", async () => {
  await assert.rejects(new Client(url).documents(), refused(401));
  await assert.rejects(new Client("http://127.0.0.1:1").documents(), TypeError);
  for (const wrong of ["", "127.0.0.1:30000", "ftp://host", "http://"]) {
    assert.throws(() => new Client(wrong), TypeError);
  }
});
