// Train an exported step with onnxruntime-web or onnxruntime-node: copy this file into your program.
//
//   const step = await Step.open(ort, async (name) => (await fetch(`model/${name}`)).arrayBuffer(), "step.json");
//   const loss = await step.train({ pixels: [pixels, [50, 64]], labels: [labels, [50]] }, 0.001);
//   const file = await step.content(); // a weights file

const HALF = globalThis.Float16Array ?? Uint16Array;
const ARRAYS = { float32: Float32Array, float16: HALF, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array };

/** The SHA-256 of bytes, in hexadecimal. */
export async function digest(bytes) {
  if (!globalThis.crypto?.subtle) throw new Error("checksums need a secure page: https, or localhost");
  const found = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(found, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** An exported step: its models, and what it keeps from call to call. */
export class Step {
  /**
   * ort: the runtime's module. read: gives the content of a file of the export as an ArrayBuffer.
   * providers: what runs the models, the first that can; `step.provider` says which one does.
   */
  static async open(ort, read, manifest, providers = ["cpu"]) {
    const step = new Step();
    const told = JSON.parse(new TextDecoder().decode(await read(manifest)));
    if (told.format !== "opgrad.step" || told.version !== 1) throw new Error(`${manifest} is no manifest of a step`);
    Object.assign(step, { ort, read, told, providers, sessions: {}, steps: 0, rate: 0.001, seed: 0 });
    await step.load(await step.file(told.files.weights));
    return step;
  }

  /** The content of a file of the export, which must be the one that was written. */
  async file(entry) {
    const content = await this.read(entry.name);
    if ((await digest(content)) !== entry.sha256) {
      throw new Error(`${entry.name} is damaged, or of another export: its SHA-256 is another`);
    }
    return content;
  }

  async session(kind) {
    if (!this.sessions[kind]) {
      const content = new Uint8Array(await this.file(this.told.files[kind]));
      // Products behind DequantizeLinear take floats: by default the runtime rounds them to 8 bits there.
      const extra = { session: { qdq_matmulnbits_accuracy_level: "1" } };
      const options = { graphOptimizationLevel: "all", logSeverityLevel: 3, extra };
      if (this.told.data?.length) options.externalData = await this.externalData();
      let problem;
      for (const provider of this.providers) {
        try {
          this.sessions[kind] = await this.ort.InferenceSession.create(content, { ...options, executionProviders: [provider] });
          if (kind === "step") this.provider = provider;
          break;
        } catch (error) {
          problem = error; // the next one may have what this one lacks
        }
      }
      if (!this.sessions[kind]) throw problem;
    }
    return this.sessions[kind];
  }

  /** The files of large constants, which the models share. */
  externalData() {
    this.data ??= Promise.all(
      this.told.data.map(async (entry) => ({ path: entry.name, data: new Uint8Array(await this.file(entry)) })),
    );
    return this.data;
  }

  /** The outputs of a model by name; it takes what it needs of the feeds and of the state. */
  async run(kind, feeds) {
    const session = await this.session(kind);
    const given = { ...this.state, ...feeds };
    return session.run(Object.fromEntries(session.inputNames.map((name) => [name, given[name]])));
  }

  tensor(dtype, data, dims) {
    return new this.ort.Tensor(dtype, data, dims);
  }

  /** A batch, arrays with their shapes by name, as tensors. Throws for what the models do not take. */
  batch(arrays) {
    const { batch, label } = this.told;
    const feeds = {};
    for (const { name, dtype, shape } of batch) {
      const [data, dims] = arrays[name] ?? [];
      const fits = dims?.length === shape.length && shape.every((size, axis) => typeof size === "string" || size === dims[axis]);
      if (!fits || !(data instanceof ARRAYS[dtype])) {
        throw new Error(`${name} has shape [${dims ?? "none"}], expected ${dtype} of shape [${shape}]`);
      }
      const count = dims.reduce((one, other) => one * other, 1);
      if (data.length !== count) throw new Error(`${name} has ${data.length} numbers, expected ${count}`);
      feeds[name] = this.tensor(dtype, data, dims);
    }
    if (label?.classes) {
      const wrong = arrays[label.name][0].find((each) => (each < 0 || each >= label.classes) && Number(each) !== label.ignored);
      if (wrong !== undefined) throw new Error(`${label.name} has ${wrong}, expected 0 to ${label.classes - 1}`);
    }
    return feeds;
  }

  /** Train on a batch and return its loss. share, update: of a step that accumulates gradients. */
  async train(arrays, rate, share = 1, update = true) {
    const feeds = this.batch(arrays);
    feeds.learning_rate = this.tensor("float32", Float32Array.of(rate), [1]);
    feeds.step = this.tensor("int64", BigInt64Array.of(BigInt(this.steps + 1)), [1]);
    feeds.seed = this.tensor("int64", BigInt64Array.of(BigInt(this.seed)), [1]); // of dropout: another one for each batch
    feeds.share = this.tensor("float32", Float32Array.of(share), [1]);
    feeds.update = this.tensor("bool", Uint8Array.of(update ? 1 : 0), [1]);
    const results = await this.run("step", feeds);
    for (const { input, output } of this.told.state) this.state[input] = results[output];
    this.rate = rate;
    this.steps += update ? 1 : 0;
    this.seed += 1;
    return results.loss.data[0];
  }

  /** Loss, scores and, for classes, accuracy of a batch, as tensors. */
  async evaluate(arrays) {
    return this.run("eval", this.batch(arrays));
  }

  /** Take the state from a weights file: of the export, of `content`, of another client. */
  async load(content) {
    const { bytes, all_bytes: all, tensors, metadata: own } = this.told.weights;
    const length = content.byteLength > 8 ? Number(new DataView(content).getBigUint64(0, true)) : 0;
    let header;
    try {
      header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(content, 8, length)));
    } catch {
      throw new Error("the weights are damaged: no header");
    }
    const { __metadata__: metadata = {}, ...entries } = header;
    const data = content.slice(8 + length);
    if (metadata.sha256 !== (await digest(data)) || ![bytes, all].includes(data.byteLength)) {
      throw new Error("the weights are damaged, or of another model: their SHA-256 or size is another");
    }
    const same = (name, { dtype, shape, data_offsets: place }) =>
      tensors[name]?.dtype === dtype && `${tensors[name].shape};${tensors[name].data_offsets}` === `${shape};${place}`;
    if (!Object.entries(entries).every(([name, entry]) => same(name, entry))) {
      throw new Error("the weights are of another model: their tensors are others");
    }
    if (data.byteLength > bytes && metadata.optimizer !== own.optimizer) {
      throw new Error(`the weights have moments of ${metadata.optimizer}, expected ${own.optimizer}`);
    }
    const state = {};
    for (const { input, dtype, shape, offset, bytes: size } of this.told.state) {
      const held = offset !== null && offset < data.byteLength; // what a file does not have starts at 0
      const values = held ? data.slice(offset, offset + size) : new ArrayBuffer(size);
      state[input] = this.tensor(dtype, new ARRAYS[dtype](values), shape);
    }
    this.state = state;
    this.steps = data.byteLength === all ? Number(metadata.step) : 0;
  }

  /** The weights file of the present state, as an ArrayBuffer. */
  async content() {
    const { tensors, metadata, all_bytes: size } = this.told.weights;
    const data = new Uint8Array(size);
    for (const { input, offset } of this.told.state) {
      const values = this.state[input].data;
      if (offset !== null) data.set(new Uint8Array(values.buffer, values.byteOffset, values.byteLength), offset);
    }
    const changing = { step: String(this.steps), learning_rate: String(this.rate), sha256: await digest(data) };
    const text = new TextEncoder().encode(JSON.stringify({ __metadata__: { ...metadata, ...changing }, ...tensors }));
    const length = Math.ceil(text.length / 8) * 8;
    const file = new Uint8Array(8 + length + size).fill(0x20, 0, 8 + length);
    new DataView(file.buffer).setBigUint64(0, BigInt(length), true);
    file.set(text, 8);
    file.set(data, 8 + length);
    return file.buffer;
  }
}
