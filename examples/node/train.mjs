// Train an exported step on the digits under Node:
//
//   node train.mjs site/step.json site/digits.json trained.safetensors [node|web]

import { readFile, rename, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";

import { Step, digest } from "../browser/step.mjs";

const [EPOCHS, BATCH, RATE] = [10, 50, 0.001];

const exact = ({ buffer, byteOffset, byteLength }) => buffer.slice(byteOffset, byteOffset + byteLength);

/** A reader of the files of a folder. */
export const reader = (folder) => async (name) => exact(await readFile(join(folder, name)));

/** The runtime by name: onnxruntime-node, or onnxruntime-web on its WebAssembly. */
export async function runtime(name) {
  if (name === "web") {
    const ort = await import("onnxruntime-web");
    ort.env.wasm.numThreads = 1;
    return [ort, ["wasm"]];
  }
  const { default: ort } = await import("onnxruntime-node");
  return [ort, ["cpu"]];
}

/** Write a file; a crash on the way leaves an older one as it was. */
export async function save(path, content) {
  await writeFile(`${path}.tmp`, new Uint8Array(content));
  await rename(`${path}.tmp`, path);
}

/** Numbers from 0 to before `count` in an order that a seed gives. */
function shuffled(count, seed) {
  const order = Array.from({ length: count }, (_, index) => index);
  let state = seed + 1;
  for (let last = count - 1; last > 0; last -= 1) {
    state = (state * 48271) % 2147483647;
    const other = state % (last + 1);
    [order[last], order[other]] = [order[other], order[last]];
  }
  return order;
}

async function digits(path) {
  const told = JSON.parse(await readFile(path));
  const bytes = new Uint8Array(exact(await readFile(join(dirname(path), told.name))));
  if ((await digest(bytes)) !== told.sha256) throw new Error(`${told.name} is damaged: its SHA-256 is another`);
  return { bytes, ...told };
}

/** Rows of the digits as a batch. */
function batchOf({ bytes, pixels }, rows) {
  const data = Float32Array.from({ length: rows.length * pixels }, (_, at) => bytes[rows[Math.floor(at / pixels)] * (pixels + 1) + (at % pixels)] / 16);
  const labels = BigInt64Array.from(rows, (row) => BigInt(bytes[row * (pixels + 1) + pixels]));
  return { pixels: [data, [rows.length, pixels]], labels: [labels, [rows.length]] };
}

async function main([manifest, data, output, kind = "node"]) {
  const [ort, providers] = await runtime(kind);
  const step = await Step.open(ort, reader(dirname(manifest)), manifest.split("/").pop(), providers);
  const held = await digits(data);
  for (let epoch = 0; epoch < EPOCHS; epoch += 1) {
    const order = shuffled(held.train, epoch);
    let sum = 0;
    for (let start = 0; start < held.train; start += BATCH) {
      sum += await step.train(batchOf(held, order.slice(start, start + BATCH)), RATE);
    }
    console.log(`epoch ${epoch + 1}: loss ${(sum / Math.ceil(held.train / BATCH)).toFixed(4)}`);
    await save(output, await step.content());
  }
  const test = Array.from({ length: held.test }, (_, index) => held.train + index);
  const { accuracy } = await step.evaluate(batchOf(held, test));
  console.log(`test accuracy ${accuracy.data[0].toFixed(4)}`);
}

if (process.argv[1] === new URL(import.meta.url).pathname) {
  if (process.argv.length < 5) throw new Error("expected: node train.mjs step.json digits.json trained.safetensors [node|web]");
  await main(process.argv.slice(2));
}
