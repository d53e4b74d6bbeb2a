import * as ort from "./ort.wasm.min.mjs";

import { train } from "./cases.mjs";
import { Step } from "./step.mjs";

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = new URL("./", location.href).href;
const read = async (name) => (await fetch(name)).arrayBuffer();
document.getElementById("found").textContent = JSON.stringify(await train(Step, ort, read, ["wasm"]));
