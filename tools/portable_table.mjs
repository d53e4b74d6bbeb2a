// Run the models of portable_table.py: node portable_table.mjs FOLDER MODULES node|web

import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array, float64: Float64Array };
const [folder, modules, kind] = process.argv.slice(2);
const require = createRequire(pathToFileURL(join(modules, "package.json")));
const name = `onnxruntime-${kind}`;
const loaded = await import(pathToFileURL(require.resolve(name)));
const ort = loaded.InferenceSession ? loaded : loaded.default;
if (kind === "web") ort.env.wasm.numThreads = 1;
const providers = [kind === "web" ? "wasm" : "cpu"];
const exact = ({ buffer, byteOffset, byteLength }) => buffer.slice(byteOffset, byteOffset + byteLength);

async function results({ file, inputs, outputs }) {
  const model = new Uint8Array(exact(await readFile(join(folder, file))));
  const session = await ort.InferenceSession.create(model, { executionProviders: providers, logSeverityLevel: 4 });
  const feeds = {};
  for (const { name: input, dtype, shape, file: values } of inputs) {
    feeds[input] = new ort.Tensor(dtype, new ARRAYS[dtype](exact(await readFile(join(folder, values)))), shape);
  }
  const found = await session.run(feeds);
  await session.release();
  return outputs.map((output) => Array.from(found[output].data, Number));
}

const found = {};
for (const each of JSON.parse(await readFile(join(folder, "cases.json")))) {
  try {
    found[each.file] = await results(each);
  } catch (error) {
    found[each.file] = String(error.message).slice(0, 200);
  }
}
const { version } = JSON.parse(await readFile(join(modules, "node_modules", name, "package.json")));
// JSON has no numbers that are not finite.
const text = (_, value) => (typeof value === "number" && !Number.isFinite(value) ? String(value) : value);
console.log(JSON.stringify({ version, found }, text));
