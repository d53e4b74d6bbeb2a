// The page: it asks the worker, and shows what that tells.

import { Chart } from "./chart.mjs";

const at = (id) => document.getElementById(id);
const chart = new Chart(at("chart"));
const worker = new Worker("worker.mjs", { type: "module" });
const first = {};
let training = false;

function show(on) {
  training = on;
  at("train").textContent = on ? "Stop" : "Train";
  at("save").disabled = on;
}

/** What the model writes: at first beside what it writes now. */
function showText(prompt, text) {
  if (!(prompt in first)) {
    first[prompt] = Object.assign(document.createElement("dd"), { className: "answer" });
    const before = Object.assign(document.createElement("dd"), { className: "note", textContent: `before: ${text}` });
    at("texts").append(Object.assign(document.createElement("dt"), { textContent: prompt }), before, first[prompt]);
  }
  first[prompt].textContent = text;
}

const TOLD = {
  "open.done"({ answer }) {
    at("runtime").textContent = `WebAssembly · ${answer.numbers.toLocaleString("en")} numbers are trained on ${answer.rows} examples`;
    at("train").disabled = false;
  },
  loss({ loss, steps, time }) {
    chart.add([loss]);
    at("loss").textContent = loss.toPrecision(3);
    at("steps").textContent = steps.toLocaleString("en");
    at("time").textContent = `${time.toFixed(0)} ms`;
  },
  text({ prompt, text }) {
    showText(prompt, text);
  },
  "train.done"() {
    show(false);
  },
  "stop.done"() {},
  "content.done"({ answer }) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([answer]));
    link.download = "trained.safetensors";
    link.click();
    URL.revokeObjectURL(link.href);
  },
  error({ text }) {
    Object.assign(at("message"), { textContent: text, hidden: false });
    show(false);
  },
};

worker.onmessage = ({ data }) => TOLD[data.type](data);
worker.onerror = (event) => TOLD.error({ text: `The page's worker failed: ${event.message || "a file is missing"}` });
at("save").onclick = () => worker.postMessage({ type: "content" });
at("train").onclick = () => {
  worker.postMessage(training ? { type: "stop" } : { type: "train", epochs: Number(at("epochs").value) });
  show(true);
};
worker.postMessage({ type: "open" });
