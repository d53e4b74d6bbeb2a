// node node_cases.mjs EXAMPLES FOLDER node|web

import { pathToFileURL } from "node:url";

import { train } from "./cases.mjs";

const [examples, folder, kind] = process.argv.slice(2);
const { Step } = await import(pathToFileURL(`${examples}/browser/step.mjs`));
const { reader, runtime } = await import(pathToFileURL(`${examples}/node/train.mjs`));
const [ort, providers] = await runtime(kind);
console.log(JSON.stringify(await train(Step, ort, reader(folder), providers)));
