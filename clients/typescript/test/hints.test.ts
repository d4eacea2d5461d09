// Before a real router: ROUTER_URL, which asks for ROUTER_KEY.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Client, Hints, advise } from "../src/index.js";
import { MOST_WAITING } from "../src/hints.js";

const url = process.env["ROUTER_URL"] ?? "";
const apiKey = process.env["ROUTER_KEY"] ?? "";
const silent = { apiKey, report: () => {} };

test("hints reach the router while the program works", async () => {
  const hints = new Hints(url, silent);
  const done = await advise(hints, { session: "reviewer", text: "You are a reviewer." }, async () => "done");
  assert.equal(done, "done");
  const kept = hints.hint({ messages: [{ role: "user", content: "Hello" }], priority: 2 });
  await hints.close();
  assert.deepEqual([hints.sent, hints.dropped], [2, 0]);
  assert.equal((await new Client(url, { apiKey }).hintState(kept.id ?? "")).state, "ready");
});

test("work that fails takes its hint back", async () => {
  const hints = new Hints(url, silent);
  const failing = advise(hints, { session: "s", text: "You are another reviewer." }, async () => {
    while (hints.sent === 0) await new Promise((resolve) => setTimeout(resolve, 5));
    throw new RangeError("the work failed");
  });
  await assert.rejects(failing, RangeError);
  const unsent = hints.hint({ text: "Never sent." });
  unsent.withdraw();
  await hints.close();
  assert.deepEqual([hints.sent, hints.withdrawn, hints.dropped], [1, 1, 0]);
});

test("refused hints are dropped, and the first is reported", async () => {
  const reasons: string[] = [];
  const hints = new Hints(url, { apiKey, report: (reason) => reasons.push(reason) });
  for (let at = 0; at < 3; at += 1) hints.hint({ session: "never seen" });
  hints.hint({ text: "This one is fine." });
  await hints.close();
  assert.deepEqual([hints.sent, hints.dropped, reasons.length], [1, 3, 1]);
  assert.match(reasons[0] ?? "", /unknown_session/);
  hints.hint({ text: "After the end." });
  assert.equal(hints.sent, 1);
});

test("a missing router does not stop its clients", async () => {
  const hints = new Hints("http://127.0.0.1:1", silent);
  for (let at = 0; at < MOST_WAITING + 10; at += 1) hints.hint({ session: String(at) });
  assert.equal(hints.dropped, 10);
  await hints.close();
  assert.deepEqual([hints.sent, hints.dropped], [0, MOST_WAITING + 10]);
});
