// The page's training under Node: node train.mjs SITE trained.safetensors [EPOCHS] [node|web]

import { Step } from "../../browser/step.mjs";
import { reader, runtime, save } from "../../node/train.mjs";
import { Learner } from "./learner.mjs";

const [site, output, epochs = 4, kind = "node"] = process.argv.slice(2);
const [ort, providers] = await runtime(kind);
const read = reader(site);
const step = await Step.open(ort, read, "step.json", providers);
const learner = new Learner(step, JSON.parse(new TextDecoder().decode(await read("examples.json"))));

async function texts() {
  for (const prompt of learner.prompts) console.log(`${prompt.text} → ${await learner.write(prompt)}`);
}

await texts();
for (let epoch = 1; epoch <= Number(epochs); epoch += 1) {
  const losses = [];
  await learner.epoch((loss) => losses.push(loss));
  console.log(`epoch ${epoch}: loss ${(losses.reduce((a, b) => a + b) / losses.length).toFixed(4)}`);
  await save(output, await step.content());
}
await texts();
