// Batches of examples for an exported step of a language model, and what the model writes: for a page's worker and Node.

const [BATCH, RATE, WARMUP, MOST] = [8, 0.004, 10, 24]; // rows, the highest learning rate, steps up to it, tokens

export class Learner {
  /** step: of step.mjs. examples: the content of examples.json. */
  constructor(step, examples) {
    Object.assign(this, { step, ...examples });
  }

  /** Rows as arrays with their shapes, padded on the right; a label of -100 counts for nothing. */
  batch(rows) {
    const length = Math.max(...rows.map(({ tokens }) => tokens.length));
    const arrays = { tokens: [0n, "input_ids"], labels: [-100n, "labels"] };
    return Object.fromEntries(Object.entries(arrays).map(([name, [filler, input]]) => {
      const data = new BigInt64Array(rows.length * length).fill(filler);
      rows.forEach((row, place) => data.set(row[name].map(BigInt), place * length));
      return [input, [data, [rows.length, length]]];
    }));
  }

  /** Train on all rows once, in another order each time; tells the loss of every batch. */
  async epoch(told, goesOn = () => true) {
    const order = this.rows.map((row) => [Math.random(), row]).sort(([a], [b]) => a - b).map(([, row]) => row);
    for (let start = 0; start + BATCH <= order.length && goesOn(); start += BATCH) {
      const rate = RATE * Math.min(1, (this.step.steps + 1) / WARMUP);
      await told(await this.step.train(this.batch(order.slice(start, start + BATCH)), rate));
    }
  }

  /** What the model writes behind a prompt, the likeliest token each time. */
  async write({ tokens }) {
    const all = [...tokens];
    while (all.length < tokens.length + MOST && !this.ends.includes(all.at(-1))) {
      const input = this.step.tensor("int64", BigInt64Array.from(all, BigInt), [1, all.length]);
      const { data, dims } = (await this.step.run("infer", { input_ids: input })).scores;
      const last = data.subarray(data.length - dims.at(-1));
      all.push(last.reduce((best, score, token) => (score > last[best] ? token : best), 0));
    }
    return all.slice(tokens.length).filter((token) => !this.ends.includes(token)).map((token) => this.texts[token]).join("").trim();
  }
}
