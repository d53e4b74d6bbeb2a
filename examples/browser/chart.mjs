// The loss of every batch as dots, their moving mean as a line, on a logarithmic scale.

const [LEFT, BOTTOM, SMOOTHING, MOST] = [44, 22, 0.15, 1500];

export class Chart {
  constructor(canvas) {
    Object.assign(this, { canvas, losses: [], first: 0 });
    new ResizeObserver(() => this.show()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show());
  }

  /** first: the number of the step before these losses. */
  start(first) {
    Object.assign(this, { losses: [], first });
    this.show();
  }

  add(losses) {
    this.losses.push(...losses);
    this.show();
  }

  show() {
    const { canvas, losses } = this;
    const ratio = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    Object.assign(context, { font: "12px system-ui, sans-serif", fillStyle: resolved(canvas, "--quiet") });
    const low = Math.min(0.05, ...losses.filter((each) => each > 0));
    const high = Math.max(3, ...losses);
    const y = (loss) => 6 + (height - BOTTOM - 6) * (Math.log(high / Math.max(loss, low)) / Math.log(high / low));
    const x = (index) => LEFT + ((width - LEFT - 6) * index) / Math.max(losses.length - 1, 1);
    context.strokeStyle = resolved(canvas, "--line");
    for (const mark of [3, 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001].filter((each) => each >= low && each <= high)) {
      context.textAlign = "right";
      context.fillText(String(mark), LEFT - 8, y(mark) + 4);
      context.beginPath();
      context.moveTo(LEFT, y(mark));
      context.lineTo(width, y(mark));
      context.stroke();
    }
    context.textAlign = "left";
    context.fillText(`step ${this.first.toLocaleString("en")}`, LEFT, height - 4);
    context.textAlign = "right";
    context.fillText((this.first + losses.length).toLocaleString("en"), width - 4, height - 4);
    this.dots(context, x, y);
    this.line(context, x, y);
  }

  dots(context, x, y) {
    context.fillStyle = resolved(this.canvas, "--accent");
    context.globalAlpha = 0.25;
    const each = Math.ceil(this.losses.length / MOST);
    for (let index = 0; index < this.losses.length; index += each) {
      context.fillRect(x(index) - 1, y(this.losses[index]) - 1, 2.5, 2.5);
    }
    context.globalAlpha = 1;
  }

  line(context, x, y) {
    Object.assign(context, { strokeStyle: resolved(this.canvas, "--accent"), lineWidth: 2.5, lineJoin: "round" });
    context.beginPath();
    let mean = this.losses[0];
    this.losses.forEach((loss, index) => {
      mean += SMOOTHING * (loss - mean);
      context.lineTo(x(index), y(mean));
    });
    context.stroke();
  }
}

/** A color of the style sheet as a canvas takes it. */
function resolved(canvas, name) {
  canvas.style.color = `var(${name})`;
  return getComputedStyle(canvas).color;
}
