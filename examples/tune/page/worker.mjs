// Training, off the page's own thread: it answers every message, and tells losses and texts in between.

import { Learner } from "./learner.mjs";
import * as ort from "./ort.wasm.min.mjs";
import { Step } from "./step.mjs";

const read = async (name) => {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name}: the server says ${answer.status}`);
  return answer.arrayBuffer();
};
let learner, running = false;

async function texts() {
  for (const prompt of learner.prompts) {
    postMessage({ type: "text", prompt: prompt.text, text: await learner.write(prompt) });
  }
}

const ASKED = {
  async open() {
    ort.env.wasm.numThreads = 1;
    ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;
    const step = await Step.open(ort, read, "step.json", ["wasm"]);
    learner = new Learner(step, JSON.parse(new TextDecoder().decode(await read("examples.json"))));
    await texts();
    return { rows: learner.rows.length, numbers: step.told.weights.bytes / 4 };
  },
  async train({ epochs }) {
    running = true;
    for (let epoch = 0; epoch < epochs && running; epoch += 1) {
      let before = performance.now();
      await learner.epoch(async (loss) => {
        postMessage({ type: "loss", loss, steps: learner.step.steps, time: performance.now() - before });
        await new Promise((resolve) => setTimeout(resolve)); // let messages come in
        before = performance.now();
      }, () => running);
      await texts();
    }
    running = false;
  },
  async stop() {
    running = false;
  },
  async content() {
    return learner.step.content();
  },
};

onmessage = async ({ data: { type, ...rest } }) => {
  try {
    postMessage({ type: `${type}.done`, answer: await ASKED[type](rest) });
  } catch (error) {
    postMessage({ type: "error", text: error?.message ?? String(error) });
  }
};
