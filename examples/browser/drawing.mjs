// Strokes on a canvas, and the 8 × 8 pixels that the network sees: the digit fills 32 × 32 points, as the scanned ones of
// the training data do, and each pixel counts the 4 × 4 points under it that are black.

const [POINTS, PIXELS, PEN] = [32, 8, 3.6];

export class Pad {
  /** changed: called after every stroke, and while one is drawn. */
  constructor(canvas, changed) {
    Object.assign(this, { canvas, changed, strokes: [] });
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => this.end());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  place({ clientX, clientY }) {
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    return [((clientX - left) / width) * this.canvas.width, ((clientY - top) / height) * this.canvas.height];
  }

  begin(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.drawing = [this.place(event)];
    this.strokes.push(this.drawing);
    this.show();
  }

  move(event) {
    if (!this.drawing) return;
    this.drawing.push(this.place(event));
    this.show();
  }

  end() {
    this.drawing = null;
  }

  clear() {
    this.strokes = [];
    this.show();
  }

  show() {
    this.paint();
    this.changed(this.pixels());
  }

  paint() {
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    draw(context, this.strokes, getComputedStyle(this.canvas).color, 20);
  }

  /** 64 numbers from 0 to 1; null if nothing is drawn. */
  pixels() {
    const points = this.strokes.flat();
    if (!points.length) return null;
    const [left, right, top, bottom] = edges(points);
    const scale = (POINTS - PEN) / Math.max(bottom - top, right - left, 1);
    const shift = [(POINTS - (left + right) * scale) / 2, (POINTS - (top + bottom) * scale) / 2];
    const scaled = this.strokes.map((stroke) => stroke.map(([x, y]) => [x * scale + shift[0], y * scale + shift[1]]));
    const context = new OffscreenCanvas(POINTS, POINTS).getContext("2d", { willReadFrequently: true });
    draw(context, scaled, "black", PEN);
    const { data } = context.getImageData(0, 0, POINTS, POINTS);
    const counts = new Float32Array(PIXELS * PIXELS);
    const size = POINTS / PIXELS;
    for (let y = 0; y < POINTS; y += 1) {
      for (let x = 0; x < POINTS; x += 1) {
        const black = data[(y * POINTS + x) * 4 + 3] > 127;
        counts[Math.floor(y / size) * PIXELS + Math.floor(x / size)] += black ? 1 / size ** 2 : 0;
      }
    }
    return counts;
  }
}

function edges(points) {
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  return [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
}

function draw(context, strokes, color, width) {
  Object.assign(context, { strokeStyle: color, lineWidth: width, lineCap: "round", lineJoin: "round" });
  for (const stroke of strokes) {
    context.beginPath();
    context.moveTo(...stroke[0]);
    for (const point of stroke.length > 1 ? stroke : [stroke[0], stroke[0]]) context.lineTo(...point);
    context.stroke();
  }
}

const shown = new WeakMap(); // the pixels of a canvas
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => {
  for (const canvas of document.querySelectorAll("canvas")) if (shown.has(canvas)) showPixels(canvas, shown.get(canvas));
});

/** Show 64 numbers on a canvas of 8 × 8: ink on paper, and in the dark light on a dark ground. */
export function showPixels(canvas, pixels) {
  shown.set(canvas, pixels);
  const [ground, ink] = dark.matches ? [38, 235] : [245, 20];
  const image = new ImageData(PIXELS, PIXELS);
  for (let at = 0; at < PIXELS * PIXELS; at += 1) {
    const grey = ground + (ink - ground) * (pixels?.[at] ?? 0);
    image.data.set([grey, grey, grey, 255], at * 4);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
