// The page: it asks the worker, shows what that tells, and keeps the weights.

import { Chart } from "./chart.mjs";
import { Pad, showPixels } from "./drawing.mjs";
import { explained, forget, mayKeep, recall, store } from "./storage.mjs";

const at = (id) => document.getElementById(id);
const NAMES = { wasm: "WebAssembly", webgpu: "WebGPU" };
const chart = new Chart(at("chart"));
const waiting = new Map();
const NOT_KEPT = "Another tab of this page keeps its weights in this browser. What this one learns is not kept: save it to a "
  + "file, or close the other tab and load this one again.";
let [number, training, drawn, pixels, asking, keeping] = [0, false, [], null, false, Promise.resolve()];
let worker, keeps; // keeps: whether this tab keeps weights in the browser

function ask(type, rest = {}) {
  number += 1;
  worker.postMessage({ number, type, ...rest });
  return new Promise((resolve, reject) => waiting.set(number, { resolve, reject }));
}

function startWorker() {
  worker = new Worker("worker.mjs", { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.number === undefined) return TOLD[data.type](data);
    const { resolve, reject } = waiting.get(data.number);
    waiting.delete(data.number);
    return data.error === undefined ? resolve(data.answer) : reject(new Error(data.error));
  };
  worker.onerror = (event) => say(`The page's worker failed: ${event.message || "a file is missing"}`);
}

/** Show what went wrong, or nothing. */
function say(text) {
  at("message").textContent = text;
  at("message").hidden = !text;
}

/** Run what a person asked for; what goes wrong is said. */
const guarded = (work) => async (...given) => {
  try {
    say("");
    await work(...given);
  } catch (error) {
    say(error.message);
  }
};

// --- what is shown ---

const percent = (share) => `${(100 * share).toFixed(1)} %`;

function showAccuracy(share) {
  at("accuracy").textContent = percent(share);
}

function showSteps(steps) {
  at("steps").textContent = steps.toLocaleString("en");
}

/** The losses of further batches; none: of weights that were taken from elsewhere, nobody knows one. */
function showLosses(losses, first) {
  if (first !== undefined) chart.start(first);
  chart.add(losses);
  if (losses.length || first !== undefined) at("loss").textContent = losses.at(-1)?.toPrecision(3) ?? "–";
}

const TOLD = {
  progress({ losses, done, steps, time }) {
    showLosses(losses);
    at("progress").value = done;
    at("time").textContent = `${time.toFixed(time < 10 ? 2 : 0)} ms`;
    showSteps(steps);
    if (pixels) showScores();
  },
  epoch({ accuracy, content }) {
    showAccuracy(accuracy);
    keep(content);
  },
};

/** Keep weights and drawn digits in the browser, one save after the other. */
function keep(content) {
  if (!keeps) {
    at("saved").textContent = NOT_KEPT;
    return null;
  }
  at("saved").textContent = "Keeping the weights…";
  const own = keeping.then(async () => {
    let told = `Kept in this browser at ${new Date().toLocaleTimeString()}.`;
    try {
      await store({ content, drawn });
    } catch (error) {
      told = "";
      say(explained(error));
    }
    if (own === keeping) at("saved").textContent = told; // else a newer one is on its way
  });
  keeping = own;
  return own;
}

async function showScores() {
  if (asking || !pixels) return; // one question at a time; the last drawing is asked about in the end
  asking = true;
  let asked;
  do {
    asked = pixels;
    const found = await ask("scores", { pixels: asked });
    if (pixels) showBars(found);
  } while (asked !== pixels && pixels);
  asking = false;
}

function showBars(found) {
  const best = found.indexOf(Math.max(...found));
  [...at("scores").children].forEach((item, digit) => {
    item.classList.toggle("best", digit === best);
    item.firstChild.style.height = `${4 * found[digit]}rem`;
    item.title = percent(found[digit]);
  });
  at("answer").textContent = `It takes this for a ${best}, with ${percent(found[best])}.`;
}

function showDrawn() {
  at("mine").replaceChildren(...drawn.map(({ pixels: each, label }) => {
    const figure = document.createElement("figure");
    const picture = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
    showPixels(picture, each);
    figure.append(picture, Object.assign(document.createElement("figcaption"), { textContent: label }));
    return figure;
  }));
}

function enable() {
  at("train").textContent = training ? "Pause" : "Train";
  for (const id of ["train", "save", "open", "reset", "clear"]) at(id).disabled = false;
  for (const button of at("labels").querySelectorAll("button")) button.disabled = !pixels;
}

// --- what a person does ---

const rate = () => Number(at("rate").value);

async function toggle() {
  if (training) return ask("stop");
  const epochs = at("epochs").valueAsNumber;
  if (!(epochs >= 1 && epochs <= 500)) throw new Error("Epochs: expected a number from 1 to 500");
  training = true;
  enable();
  try {
    return await ask("train", { epochs: Math.round(epochs), rate: rate() });
  } finally {
    training = false;
    enable();
  }
}

async function learn(label) {
  const given = pixels;
  drawn.push({ pixels: given, label });
  showDrawn();
  at("answer").textContent = "Learning…";
  const { before, now, taken, losses, accuracy, content, steps } = await ask("learn", { pixels: given, label, rate: rate() });
  showLosses(losses);
  showAccuracy(accuracy);
  showSteps(steps);
  showBars(now);
  at("answer").textContent = taken
    ? `Learned: in ${taken} steps ${label} went from ${percent(before[label])} to ${percent(now[label])}.`
    : `It knew: ${label} with ${percent(now[label])}.`;
  await keep(content);
}

async function saveFile() {
  const { content } = await ask("content");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  link.download = "digits.safetensors";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

async function openFile() {
  const [file] = at("file").files;
  at("file").value = "";
  if (file) await take({ content: await file.arrayBuffer() });
}

/** Take weights, of a file or of the browser. */
async function take({ content, drawn: own }) {
  const { steps, accuracy } = await ask("load", { content, drawn: own });
  if (own) drawn = own;
  showLosses([], steps);
  showSteps(steps);
  showAccuracy(accuracy);
  showDrawn();
  if (pixels) await showScores();
}

/** Whether a person lets what was learned go. */
function mayForget() {
  const [learned, own] = [at("steps").textContent, drawn.length];
  if (learned === "0" && !own) return true;
  const digits = own ? ` and ${own} ${own === 1 ? "digit" : "digits"} that you drew` : "";
  at("question").textContent = `Forget ${learned} steps of training${digits}? A file that you saved stays.`;
  at("asking").returnValue = "";
  at("asking").showModal();
  return new Promise((resolve) => {
    at("asking").onclose = () => resolve(at("asking").returnValue === "forget");
  });
}

async function startAnew() {
  if (!(await mayForget())) return;
  await ask("stop");
  if (keeps) await forget();
  drawn = [];
  const { steps, accuracy } = await ask("reset");
  showLosses([], steps);
  at("progress").value = 0;
  at("saved").textContent = "";
  showSteps(steps);
  showAccuracy(accuracy);
  showDrawn();
}

// --- the beginning ---

function listen() {
  at("train").onclick = guarded(toggle);
  at("save").onclick = guarded(saveFile);
  at("open").onclick = () => at("file").click();
  at("file").onchange = guarded(openFile);
  at("reset").onclick = guarded(startAnew);
  at("forget").onclick = () => at("asking").close("forget");
  at("stay").onclick = () => at("asking").close("");
  const pad = new Pad(at("pad"), (found) => {
    pixels = found;
    showPixels(at("seen"), found);
    enable();
    if (found) guarded(showScores)();
    else at("answer").textContent = "Draw something.";
  });
  at("clear").onclick = () => pad.clear();
  for (let digit = 0; digit < 10; digit += 1) {
    const item = document.createElement("li");
    item.append(document.createElement("i"), String(digit));
    at("scores").append(item);
    const button = Object.assign(document.createElement("button"), { textContent: digit, type: "button", disabled: true });
    button.onclick = guarded(() => learn(digit));
    at("labels").append(button);
  }
  showPixels(at("seen"), null);
}

/** Let what is asked for from now on be kept, so that the page works without a network. Says whether it is. */
async function keepFiles() {
  if (!navigator.serviceWorker) return false;
  try {
    await navigator.serviceWorker.register("offline.mjs", { type: "module" });
    await navigator.serviceWorker.ready;
    const taken = new Promise((resolve) => navigator.serviceWorker.addEventListener("controllerchange", resolve, { once: true }));
    if (!navigator.serviceWorker.controller) await Promise.race([taken, new Promise((resolve) => setTimeout(resolve, 3000))]);
    return Boolean(navigator.serviceWorker.controller);
  } catch {
    return false; // a browser that keeps nothing for this page shows it all the same
  }
}

async function begin() {
  const [offline, first] = await Promise.all([keepFiles(), mayKeep()]);
  keeps = first;
  startWorker();
  const wanted = new URLSearchParams(location.search).get("runtime") ?? "auto";
  const { provider, note, steps, bytes } = await ask("open", { kind: wanted in NAMES ? wanted : "auto" });
  at("runtime").textContent = `Runs on ${NAMES[provider]}${note ? `: ${note}` : ""}`;
  at("sizes").textContent = `Models, weights and digits are ${Math.round(bytes / 1024)}\u00a0KiB.`;
  showSteps(steps);
  const { record, problems } = await recall(take);
  if (record) at("saved").textContent = "Went on with the weights kept in this browser.";
  if (problems.length) say(`Weights kept in this browser cannot be used: ${problems[0]}.${record ? " Older ones are here." : " The first ones are here."}`);
  if (!record) showAccuracy((await ask("load", { content: (await ask("content")).content })).accuracy);
  if (!keeps) at("saved").textContent = NOT_KEPT;
  if (offline) at("offline").textContent = "It works without a network, too.";
  enable();
}

listen();
guarded(begin)();
