// What the client says of what does not fit: node refusals.mjs EXAMPLES SITE node|web

import { pathToFileURL } from "node:url";

const [examples, site, kind] = process.argv.slice(2);
const { Step } = await import(pathToFileURL(`${examples}/browser/step.mjs`));
const { reader, runtime } = await import(pathToFileURL(`${examples}/node/train.mjs`));
const [ort, providers] = await runtime(kind);
const read = reader(site);

const pixels = [new Float32Array(128).fill(0.5), [2, 64]];
const labels = [BigInt64Array.of(1n, 2n), [2]];
const labelled = (each) => ({ pixels, labels: [BigInt64Array.of(1n, each), [2]] });
const step = await Step.open(ort, read, "step.json", providers);
const loss = await step.train({ pixels, labels }, 0.001);
const held = await step.content();

/** A reader that damages one file. */
const damaged = (wanted, damage) => async (name) => (name === wanted ? damage(await read(name)) : read(name));
const flipped = (content) => {
  new Uint8Array(content)[content.byteLength - 1] ^= 1;
  return content;
};
const another = (read_, batch = { pixels, labels }) => Step.open(ort, read_, "step.json", providers).then((own) => own.train(batch, 0.001));

const tried = {
  width: () => step.train({ pixels: [new Float32Array(126), [2, 63]], labels }, 0.001),
  dtype: () => step.train({ pixels: [new Float64Array(128), [2, 64]], labels }, 0.001),
  data: () => step.train({ pixels: [new Float32Array(5), [2, 64]], labels }, 0.001),
  missing: () => step.train({ pixels }, 0.001),
  high: () => step.train(labelled(10n), 0.001),
  negative: () => step.train(labelled(-2n), 0.001),
  model: () => another(damaged("step.onnx", flipped)),
  weights: async () => step.load(flipped(held.slice(0))),
  short: () => step.load(new ArrayBuffer(3)),
  manifest: () => another(damaged("step.json", () => new TextEncoder().encode('{"format": "other"}'))),
};
const found = { kept: [] };
for (const [name, work] of Object.entries(tried)) {
  try {
    await work();
    found[name] = "nothing was said";
  } catch (error) {
    found[name] = error.message;
  }
  found.kept.push(Buffer.from(await step.content()).equals(Buffer.from(held)) && step.steps === 1);
}
if (!(loss > 0)) throw new Error(`the loss is ${loss}`);
console.log(JSON.stringify(found));
