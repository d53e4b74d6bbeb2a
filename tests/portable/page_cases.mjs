// cases.html: every case in WebAssembly; cases.html?runtime=webgpu&only=NAME: one of them on WebGPU.

import { train } from "./cases.mjs";
import { Step } from "./step.mjs";

const asked = new URLSearchParams(location.search);
const kind = asked.get("runtime") ?? "wasm";
const ort = await import(`./ort.${kind}.min.mjs`);
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = new URL("./", location.href).href;
const read = async (name) => (await fetch(name)).arrayBuffer();
const found = await train(Step, ort, read, [kind], asked.get("only"));
document.getElementById("found").textContent = JSON.stringify(found);
