// Training, off the page's own thread. Every message has a number, which its answer has, too; `progress` and `epoch` are
// told in between.

import { Step, digest } from "./step.mjs";

const [BATCH, TOLD_EVERY, LEARN_STEPS, SURE] = [50, 60, 60, 0.9]; // rows, ms, steps, probability
const [OWN, COPIES] = [10, 2]; // rows of a batch that are drawn digits, at most; how often each of them
const PATIENCE = 60000; // ms; a first step compiles all shaders

const page = (name) => new URL(name, import.meta.url);
const channel = new MessageChannel();
let step, digits, drawn = [], running = false, queue = Promise.resolve();

/** Files of the page, each asked for once. */
const files = new Map();
async function read(name) {
  if (!files.has(name)) {
    const answer = await fetch(page(name));
    if (!answer.ok) throw new Error(`${name}: the server says ${answer.status}`);
    files.set(name, await answer.arrayBuffer());
  }
  return files.get(name).slice(0);
}

/** One thing after the other: runs of a model do not overlap. */
function inTurn(work) {
  const done = queue.then(work);
  queue = done.catch(() => {});
  return done;
}

/** Let messages come in. */
const pause = () => new Promise((resolve) => {
  channel.port1.onmessage = resolve;
  channel.port2.postMessage(null);
});

// --- opening ---

async function opened(kind) {
  const ort = await import(page(`ort.${kind}.min.mjs`));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = page("./").href;
  const found = await Step.open(ort, read, "step.json", [kind]);
  await found.train(batchOf(rowsFrom(0)), 0); // a graph may load and not run
  await found.load(await read(found.told.files.weights.name));
  return found;
}

async function open({ kind }) {
  const told = JSON.parse(new TextDecoder().decode(await read("digits.json")));
  const content = await read(told.name);
  if ((await digest(content)) !== told.sha256) throw new Error(`${told.name} is damaged: its SHA-256 is another`);
  digits = { ...told, bytes: new Uint8Array(content) };
  const [asked, why] = await provider(kind);
  let note = why;
  if (asked === "webgpu") {
    try {
      step = await Promise.race([opened("webgpu"), late()]);
    } catch (error) {
      note = `WebGPU cannot run this graph (${error.message.slice(0, 120)})`;
    }
  }
  step = step ?? (await opened("wasm"));
  await Promise.all(Object.values(step.told.files).map(({ name }) => read(name))); // what is asked for later, too
  const bytes = [...files.values()].reduce((sum, each) => sum + each.byteLength, 0);
  return { provider: step.provider, note, steps: step.steps, bytes };
}

/** An error when WebGPU has had time enough for a first step. */
function late() {
  return new Promise((_, reject) => setTimeout(() => reject(new Error(`no step in ${PATIENCE / 1000} seconds`)), PATIENCE));
}

/** WebGPU if the browser has it on a GPU, else WebAssembly, and why. */
async function provider(kind) {
  if (kind !== "auto") return [kind, ""];
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  if (!adapter) return ["wasm", "this browser offers no WebGPU"];
  return adapter.info?.isFallbackAdapter ? ["wasm", "this browser's WebGPU has no GPU"] : ["webgpu", ""];
}

// --- batches ---

function rowsFrom(first) {
  return Array.from({ length: BATCH }, (_, index) => first + index);
}

/** Rows of the digits, and drawn ones, as a batch. */
function batchOf(rows, own = []) {
  const { bytes, pixels: size } = digits;
  const count = rows.length + own.length;
  const [pixels, labels] = [new Float32Array(count * size), new BigInt64Array(count)];
  rows.forEach((row, index) => {
    for (let at = 0; at < size; at += 1) pixels[index * size + at] = bytes[row * (size + 1) + at] / 16;
    labels[index] = BigInt(bytes[row * (size + 1) + size]);
  });
  own.forEach((each, index) => {
    pixels.set(each.pixels, (rows.length + index) * size);
    labels[rows.length + index] = BigInt(each.label);
  });
  return { pixels: [pixels, [count, size]], labels: [labels, [count]] };
}

function shuffled(count) {
  const order = Array.from({ length: count }, (_, index) => index);
  for (let last = count - 1; last > 0; last -= 1) {
    const other = Math.floor(Math.random() * (last + 1));
    [order[last], order[other]] = [order[other], order[last]];
  }
  return order;
}

/** Drawn digits for a batch: some of them, several times, so that they count. */
function someDrawn() {
  const picked = shuffled(drawn.length).slice(0, OWN / COPIES).map((index) => drawn[index]);
  return Array.from({ length: COPIES }, () => picked).flat();
}

// --- what the page asks for ---

async function accuracy() {
  const rows = Array.from({ length: digits.test }, (_, index) => digits.train + index);
  return (await step.evaluate(batchOf(rows))).accuracy.data[0];
}

async function train({ epochs, rate }) {
  running = true;
  for (let epoch = 0; epoch < epochs && running; epoch += 1) {
    const order = shuffled(digits.train);
    let told = { losses: [], at: performance.now() };
    for (let start = 0; start < order.length && running; start += BATCH) {
      told.losses.push(await inTurn(() => step.train(batchOf(order.slice(start, start + BATCH), someDrawn()), rate)));
      const spent = performance.now() - told.at;
      if (spent > TOLD_EVERY || start + BATCH >= order.length) {
        const done = (epoch + Math.min(1, (start + BATCH) / order.length)) / epochs;
        postMessage({ type: "progress", losses: told.losses, done, steps: step.steps, time: spent / told.losses.length });
        await pause();
        told = { losses: [], at: performance.now() };
      }
    }
    postMessage({ type: "epoch", accuracy: await inTurn(accuracy), content: await inTurn(() => step.content()), steps: step.steps });
  }
  const finished = running;
  running = false;
  return { finished };
}

async function scores({ pixels }) {
  const { scores: found } = await inTurn(() => step.run("infer", { pixels: step.tensor("float32", pixels, [1, 64]) }));
  const most = Math.max(...found.data);
  const powers = Array.from(found.data, (each) => Math.exp(each - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((each) => each / sum);
}

/** Train on a drawn digit among others until the network is sure of it. */
async function learn({ pixels, label, rate }) {
  drawn.push({ pixels, label });
  const before = await scores({ pixels });
  let [steps, losses, now] = [0, [], before];
  while (steps < LEARN_STEPS && now[label] < SURE) {
    const rows = shuffled(digits.train).slice(0, BATCH - OWN);
    const own = [...Array.from({ length: OWN / 2 }, () => ({ pixels, label })), ...someDrawn().slice(0, OWN / 2)];
    losses.push(await inTurn(() => step.train(batchOf(rows, own), rate)));
    steps += 1;
    now = await scores({ pixels });
  }
  return { before, now, taken: steps, losses, accuracy: await inTurn(accuracy), content: await inTurn(() => step.content()), steps: step.steps };
}

async function load({ content, drawn: own }) {
  await inTurn(() => step.load(content));
  drawn = own ?? drawn;
  return { steps: step.steps, accuracy: await inTurn(accuracy) };
}

async function reset() {
  drawn = [];
  return load({ content: await read(step.told.files.weights.name) });
}

const content = async () => ({ content: await inTurn(() => step.content()) });
const stop = async () => ({ was: running, running: (running = false) });
const ASKED = { open, train, scores, learn, load, reset, content, stop };

onmessage = async ({ data: { number, type, ...rest } }) => {
  try {
    postMessage({ number, answer: await ASKED[type](rest) });
  } catch (error) {
    running = type === "train" ? false : running;
    postMessage({ number, error: error?.message ?? String(error) });
  }
};
