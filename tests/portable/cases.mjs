// Train the steps of cases.json: in Node, `node cases.mjs FOLDER node|web`, or in a page's worker.

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array };

function* batches(content, { batch, losses }) {
  let at = 0;
  for (let step = 0; step < losses.length; step += 1) {
    yield Object.fromEntries(batch.map(({ name, dtype, shape }) => {
      const size = shape.reduce((a, b) => a * b, 1) * ARRAYS[dtype].BYTES_PER_ELEMENT;
      const data = new ARRAYS[dtype](content.slice(at, at + size));
      at += size;
      return [name, [data, shape]];
    }));
  }
}

/** The losses of every case, or of one, by its name, or what went wrong; and the milliseconds of a step. */
export async function train(Step, ort, read, providers, only = null) {
  const found = { losses: {}, times: {} };
  for (const each of JSON.parse(new TextDecoder().decode(await read("cases.json")))) {
    if (only !== null && each.name !== only) continue;
    try {
      const step = await Step.open(ort, (name) => read(`${each.name}/${name}`), "step.json", providers);
      const [losses, times] = [[], []];
      for (const batch of batches(await read(`${each.name}/batches.bin`), each)) {
        const before = performance.now();
        losses.push(await step.train(batch, each.rate));
        times.push(performance.now() - before);
      }
      found.losses[each.name] = losses;
      found.times[each.name] = times.toSorted((a, b) => a - b)[Math.floor(times.length / 2)];
    } catch (error) {
      found.losses[each.name] = String(error.message);
    }
  }
  return found;
}
