// A client of server.py under Node: node client.mjs URL FOLDER/step.json rows.json NAME SECRET ROUNDS
//
// rows.json: {"pixels": [[64 numbers], …], "labels": [digit, …]}. The step and the client are those of ../browser, ../node.

import { readFile } from "node:fs/promises";
import { basename, dirname } from "node:path";

import { Step, digest } from "../browser/step.mjs";
import { reader, runtime } from "../node/train.mjs";

const [BATCH, RATE, EPOCHS, WAIT, TRIES] = [20, 0.003, 2, 200, 100];
const pause = () => new Promise((resolve) => setTimeout(resolve, WAIT));
const [address, manifest, data, name, token, rounds] = process.argv.slice(2);

/** The server's answer; a server that is away for a moment is asked again. */
async function ask(path, body, headers = {}) {
  const options = { method: body ? "PUT" : "GET", body, headers: { Authorization: `Bearer ${token}`, ...headers } };
  for (let attempt = 0; attempt < TRIES; attempt += 1) {
    let answer;
    try {
      answer = await fetch(address + path, options);
    } catch {
      await pause();
      continue;
    }
    if (answer.ok || answer.status === 409) return answer;
    throw new Error(`the server refuses (${answer.status}): ${(await answer.json()).error}`);
  }
  throw new Error(`no server at ${address}`);
}

const { pixels, labels } = JSON.parse(await readFile(data));
const [ort, providers] = await runtime("node");
const step = await Step.open(ort, reader(dirname(manifest)), basename(manifest), providers);
const [first] = step.told.state;

async function takePart(number) {
  const answer = await ask(`/rounds/${number}/parameters`);
  const content = await answer.arrayBuffer();
  if ((await digest(content)) !== answer.headers.get("X-SHA256")) throw new Error("the parameters are damaged");
  await step.load(await step.file(step.told.files.weights)); // fresh moments
  step.state[first.input] = step.tensor("float32", new Float32Array(content), first.shape);
  let loss = NaN;
  for (let at = 0; at < EPOCHS * labels.length; at += BATCH) {
    const rows = Array.from({ length: BATCH }, (_, index) => (at + index) % labels.length);
    const batch = {
      pixels: [Float32Array.from(rows.flatMap((row) => pixels[row])), [BATCH, 64]],
      labels: [BigInt64Array.from(rows, (row) => BigInt(labels[row])), [BATCH]],
    };
    loss = await step.train(batch, RATE);
  }
  console.log(`${name}: round ${number}: ${labels.length} rows ${EPOCHS} times, last loss ${loss.toFixed(3)}`);
  const { data: found } = step.state[first.input];
  const update = new Uint8Array(found.buffer, found.byteOffset, found.byteLength);
  const told = { "X-Samples": String(labels.length), "X-SHA256": await digest(update) };
  const sent = await ask(`/rounds/${number}/updates/${name}`, update, told);
  const what = sent.ok ? `${update.byteLength} bytes sent` : "it was over before the update came";
  console.log(`${name}: round ${number}: ${what}`);
}

for (let done = -1; ; ) {
  const { round } = await (await ask("/round")).json();
  if (round >= Number(rounds)) break;
  if (round === done) await pause();
  else await takePart((done = round));
}
