// One plot of lines over steps or seconds, on a canvas: hover, zoom, log scale, keyboard.

import { figure, limitsOf, tickLabel, ticks, whole } from "./numbers.js";
import { firstFrom, nearest } from "./lines.js";

/** @typedef {import("./lines.js").Line} Line */
/**
 * @typedef {object} Sheet What plots share.
 * @property {[number, number] | null} zoom Of the steps; null shows all.
 * @property {number | null} cursor The step that the pointer is on.
 * @property {boolean} isLog
 * @property {Set<number>} hidden Ranks.
 * @property {(step: number | null) => void} point
 * @property {(range: [number, number] | null) => void} zoomTo
 * @property {(rank: number) => {color: string, dashes: number[], name: string}} styleOf
 * @property {() => [number, number] | null} steps
 * @property {[number, string][]} marks Steps, and in words what was there.
 */
/**
 * @typedef {object} Subject
 * @property {string} title
 * @property {string} unit
 * @property {number | null} floor
 * @property {boolean} isOverSteps
 * @property {() => Map<number, Line>} lines
 * @property {(value: number) => string} [write]
 * @property {() => Line | null} [mean] A thick line over the others.
 */
/**
 * @typedef {object} Scale From values to pixels.
 * @property {[number, number]} limits Of y.
 * @property {boolean} isLog
 * @property {(x: number) => number} x
 * @property {(y: number) => number} y
 */

export const PAD = { left: 48, right: 10, top: 6, bottom: 22 };
const PEAK_PX = 9; // between marks of peaks
const NEAR_PX = 4; // a drag that is shorter is a click
let plots = 0;

export class Plot {
  /**
   * @param {Sheet} sheet
   * @param {Subject} subject
   * @param {number} height CSS pixels of the canvas.
   */
  constructor(sheet, subject, height) {
    this.sheet = sheet;
    this.subject = subject;
    this.height = height;
    this.element = document.createElement("figure");
    this.element.className = "nb-plot";
    const title = document.createElement("figcaption");
    title.id = `nbdist-plot-${(plots += 1)}`;
    title.textContent = subject.unit ? `${subject.title}, ${subject.unit}` : subject.title;
    this.canvas = document.createElement("canvas");
    this.canvas.style.height = `${height}px`;
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "slider");
    this.canvas.setAttribute("aria-labelledby", title.id);
    this.tip = document.createElement("div");
    this.tip.className = "nb-tip";
    this.tip.hidden = true;
    this.element.append(title, this.canvas, this.tip);
    /** @type {[number, number] | null} */
    this.dragged = null;
    /** @type {number | null} Of a plot over seconds, whose pointer is its own. */
    this.own = null;
    this.#listen();
  }

  /** The x that is pointed at. */
  get at() {
    return this.subject.isOverSteps ? this.sheet.cursor : this.own;
  }

  /** The range of x that is shown. */
  get range() {
    if (this.subject.isOverSteps) return this.sheet.zoom ?? this.sheet.steps();
    let [low, high] = [Infinity, -Infinity];
    for (const line of this.subject.lines().values()) {
      if (!line.n) continue;
      low = Math.min(low, line.x[0]);
      high = Math.max(high, line.x[line.n - 1]);
    }
    return high >= low ? /** @type {[number, number]} */ ([low, high]) : null;
  }

  /** The lines that are not hidden, by rank. */
  get shown() {
    return [...this.subject.lines()].filter(([rank]) => !this.sheet.hidden.has(rank));
  }

  /** Whether points of its lines over steps are left out. */
  get isThinned() {
    return this.subject.isOverSteps && this.shown.some(([, line]) => line.isThinned);
  }

  /** What is at the pointer: rank, x and value of each line, the place of the point. */
  values() {
    const at = this.at;
    if (at === null) return [];
    return this.shown.flatMap(([rank, line]) => {
      const place = nearest(line, at);
      return place < 0 ? [] : [{ rank, x: line.x[place], y: line.y[place] }];
    });
  }

  #listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      const x = this.#xAt(event);
      if (this.dragged && x !== null) this.dragged[1] = x;
      this.#point(x);
    });
    canvas.addEventListener("pointerleave", () => {
      if (!this.dragged) this.#point(null);
    });
    canvas.addEventListener("pointerdown", (event) => {
      const x = this.#xAt(event);
      if (x === null || event.button !== 0 || !this.subject.isOverSteps) return;
      canvas.setPointerCapture(event.pointerId);
      this.dragged = [x, x];
    });
    canvas.addEventListener("pointerup", () => {
      const dragged = this.dragged;
      this.dragged = null;
      if (!dragged || !this.scale) return;
      const [low, high] = dragged.toSorted((a, b) => a - b);
      if (this.scale.x(high) - this.scale.x(low) > NEAR_PX) this.sheet.zoomTo([low, high]);
    });
    canvas.addEventListener("dblclick", () => this.sheet.zoomTo(null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#point(null));
  }

  /** @param {PointerEvent} event */
  #xAt(event) {
    const range = this.range;
    if (!range) return null;
    const box = this.canvas.getBoundingClientRect();
    const wide = box.width - PAD.left - PAD.right;
    const share = (event.clientX - box.left - PAD.left) / wide;
    return range[0] + Math.min(1, Math.max(0, share)) * (range[1] - range[0]);
  }

  /** @param {number | null} x */
  #point(x) {
    if (!this.subject.isOverSteps) {
      this.own = x;
      this.draw();
      return;
    }
    this.pointed = x !== null;
    this.sheet.point(x === null ? null : this.#snapped(x));
  }

  /** The nearest step of any shown line. @param {number} x */
  #snapped(x) {
    let best = x;
    let gap = Infinity;
    for (const [, line] of this.shown) {
      const place = nearest(line, x);
      if (place >= 0 && Math.abs(line.x[place] - x) < gap) {
        best = line.x[place];
        gap = Math.abs(best - x);
      }
    }
    return best;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const line = this.shown[0]?.[1];
    const range = this.range;
    if (!line?.n || !range) return;
    const at = this.at === null ? line.n - 1 : nearest(line, this.at);
    const wide = range[1] - range[0];
    const page = Math.max(1, Math.round(line.n / 10));
    /** @type {Record<string, number>} */
    const moves = {
      ArrowLeft: at - (this.at === null ? 0 : 1), ArrowRight: at + 1,
      PageUp: at - page, PageDown: at + page, Home: 0, End: line.n - 1,
    };
    if (event.key in moves) {
      const place = Math.min(line.n - 1, Math.max(0, moves[event.key]));
      this.#point(line.x[place]);
    } else if (event.key === "+" || event.key === "-") {
      const half = wide * (event.key === "+" ? 0.25 : 1);
      const middle = this.at ?? (range[0] + range[1]) / 2;
      const all = this.sheet.steps();
      if (!this.subject.isOverSteps || !all) return;
      const [low, high] = [Math.max(all[0], middle - half), Math.min(all[1], middle + half)];
      this.sheet.zoomTo(low === all[0] && high === all[1] ? null : [low, high]);
    } else if (event.key === "Escape") {
      this.sheet.zoomTo(null);
      this.#point(null);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation(); // Jupyter's own keys
  }

  /** Draws all of it; costs about a millisecond. */
  draw() {
    const pen = penOf(this.canvas, this.height);
    if (!pen) return;
    const { context, width, ink } = pen;
    const range = this.range;
    const scale = range && this.#scaleOf(range, width);
    this.scale = scale;
    if (!scale || !range) {
      write(context, "No value yet.", width / 2, this.height / 2, ink, "center");
      return;
    }
    this.#drawAxes(context, scale, width, ink);
    context.save();
    context.beginPath();
    context.rect(PAD.left, 0, width - PAD.left - PAD.right, this.height - PAD.bottom);
    context.clip();
    const shown = this.shown;
    const mean = this.subject.mean?.();
    for (const [rank, line] of shown) {
      const { color, dashes } = this.sheet.styleOf(rank);
      const isFaint = mean || shown.length > 8;
      stroke(context, line, scale, range, color, dashes, isFaint ? 0.5 : 1, 1.4);
    }
    if (mean) stroke(context, mean, scale, range, ink, [], 1, 2.4);
    for (const [rank, line] of shown) this.#markPeaks(context, scale, range, rank, line);
    if (this.subject.isOverSteps) this.#drawMarks(context, scale, ink);
    this.#drawPointer(context, scale, ink);
    context.restore();
    this.#tell(scale, width);
  }

  /** @param {[number, number]} range @param {number} width @returns {Scale | null} */
  #scaleOf(range, width) {
    const values = [];
    for (const [, line] of this.shown) {
      const until = firstFrom(line, range[1] + 1e-6);
      for (let at = firstFrom(line, range[0]); at < until; at += 1) {
        const value = line.y[at];
        if (Number.isFinite(value) && (!this.sheet.isLog || value > 0)) values.push(value);
      }
    }
    const sorted = Float64Array.from(values).sort();
    const isLog = this.sheet.isLog && sorted.length > 0;
    let limits = limitsOf(sorted, isLog ? null : this.subject.floor);
    if (isLog) limits = [sorted[0] / 1.1, sorted[sorted.length - 1] * 1.1];
    if (!limits) return null;
    const of = isLog ? Math.log10 : (/** @type {number} */ value) => value;
    const [low, high] = limits.map(of);
    const wide = width - PAD.left - PAD.right;
    const tall = this.height - PAD.top - PAD.bottom;
    const long = range[1] - range[0] || 1;
    return {
      limits, isLog,
      x: (/** @type {number} */ x) => PAD.left + ((x - range[0]) / long) * wide,
      y: (/** @type {number} */ y) => PAD.top + (1 - (of(y) - low) / (high - low)) * tall,
    };
  }

  /** @param {CanvasRenderingContext2D} context @param {Scale} scale @param {number} width @param {string} ink */
  #drawAxes(context, scale, width, ink) {
    const range = /** @type {[number, number]} */ (this.range);
    const write_ = this.subject.write ?? tickLabel;
    context.lineWidth = 1;
    for (const value of ticks(scale.limits[0], scale.limits[1], 5, scale.isLog)) {
      const y = scale.y(value);
      if (y < 0 || y > this.height - PAD.bottom + 1) continue;
      rule(context, PAD.left, y, width - PAD.right, y, ink, 0.18);
      write(context, write_(value), PAD.left - 5, y, ink, "right");
    }
    const bottom = this.height - PAD.bottom;
    rule(context, PAD.left, bottom, width - PAD.right, bottom, ink, 0.5);
    for (const value of ticks(range[0], range[1], Math.max(2, width / 90), false)) {
      const label = this.subject.isOverSteps ? tickLabel(value) : `${tickLabel(value)} s`;
      write(context, label, scale.x(value), bottom + 11, ink, "center");
    }
  }

  /**
   * Marks what is above the axis, as pictures do; a mark each few pixels.
   * @param {CanvasRenderingContext2D} context
   * @param {Scale} scale
   * @param {[number, number]} range
   * @param {number} rank
   * @param {Line} line
   */
  #markPeaks(context, scale, range, rank, line) {
    context.fillStyle = this.sheet.styleOf(rank).color;
    let last = -Infinity;
    const until = firstFrom(line, range[1] + 1e-6);
    for (let at = firstFrom(line, range[0]); at < until; at += 1) {
      const x = scale.x(line.x[at]);
      if (!(line.y[at] > scale.limits[1]) || x - last < PEAK_PX) continue;
      last = x;
      context.beginPath();
      context.moveTo(x, PAD.top - 6);
      context.lineTo(x - 4, PAD.top + 1);
      context.lineTo(x + 4, PAD.top + 1);
      context.fill();
    }
  }

  /** @param {CanvasRenderingContext2D} context @param {Scale} scale @param {string} ink */
  #drawMarks(context, scale, ink) {
    for (const [place, [step, words]] of this.sheet.marks.entries()) {
      const x = scale.x(step);
      context.setLineDash([3, 3]);
      rule(context, x, 0, x, this.height - PAD.bottom, ink, 0.8);
      // Those of neighbours stand below each other.
      write(context, words, x + 4, PAD.top + 6 + 14 * (place % 4), ink, "left");
    }
  }

  /** @param {CanvasRenderingContext2D} context @param {Scale} scale @param {string} ink */
  #drawPointer(context, scale, ink) {
    if (this.dragged) {
      const [a, b] = this.dragged.map(scale.x);
      context.globalAlpha = 0.15;
      context.fillStyle = ink;
      context.fillRect(Math.min(a, b), 0, Math.abs(b - a), this.height - PAD.bottom);
      context.globalAlpha = 1;
    }
    if (this.at === null) return;
    const x = scale.x(this.at);
    rule(context, x, 0, x, this.height - PAD.bottom, ink, 0.6);
    for (const { rank, x: step, y } of this.values()) {
      if (!Number.isFinite(y)) continue;
      context.fillStyle = this.sheet.styleOf(rank).color;
      context.beginPath();
      context.arc(scale.x(step), scale.y(y), 3, 0, 7);
      context.fill();
    }
  }

  /**
   * Says what is at the pointer: beside it, and to who does not see it.
   * @param {Scale} scale
   * @param {number} width
   */
  #tell(scale, width) {
    const values = this.values();
    const { isOverSteps, unit } = this.subject;
    const written = this.subject.write ?? ((/** @type {number} */ y) => `${figure(y)} ${unit}`.trim());
    const range = /** @type {[number, number]} */ (this.range);
    const at = this.at ?? range[1];
    const marked = isOverSteps ? this.sheet.marks.filter(([step]) => step === at) : [];
    const head = [isOverSteps ? `step ${whole(at)}` : `${figure(at)} s`, ...marked.map(([, words]) => words)].join(", ");
    const said = values.map(({ rank, y }) => `${this.sheet.styleOf(rank).name} ${written(y)}`);
    this.canvas.setAttribute("aria-valuemin", String(range[0]));
    this.canvas.setAttribute("aria-valuemax", String(range[1]));
    this.canvas.setAttribute("aria-valuenow", String(at));
    this.canvas.setAttribute("aria-valuetext", [head, ...said].join(", "));
    const isHere = this.at !== null && values.length && (this.pointed || !isOverSteps);
    this.tip.hidden = !isHere;
    if (!isHere) return;
    this.tip.replaceChildren(line_(head), ...values.slice(0, 16).map(({ rank, x, y }) => {
      const { color, name } = this.sheet.styleOf(rank);
      const where = isOverSteps && x !== at ? ` (step ${whole(x)})` : "";
      return line_(`${name}  ${written(y)}${where}`, color);
    }));
    const x = scale.x(at);
    this.tip.style.left = x < width / 2 ? `${x + 12}px` : "";
    this.tip.style.right = x < width / 2 ? "" : `${width - x + 12}px`;
  }
}

/** @param {string} words @param {string} [color] */
function line_(words, color) {
  const element = document.createElement("div");
  element.textContent = words;
  if (color) element.style.borderLeft = `3px solid ${color}`;
  if (color) element.style.paddingLeft = "5px";
  return element;
}

/**
 * A canvas made as sharp as the screen, and empty; null while it is not seen.
 * @param {HTMLCanvasElement} canvas
 * @param {number} height
 */
export function penOf(canvas, height) {
  const width = canvas.clientWidth;
  const context = canvas.getContext("2d");
  if (!width || !context) return null;
  const sharp = window.devicePixelRatio || 1;
  const [across, down] = [Math.round(width * sharp), Math.round(height * sharp)];
  if (canvas.width !== across) canvas.width = across;
  if (canvas.height !== down) canvas.height = down;
  context.setTransform(sharp, 0, 0, sharp, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px sans-serif";
  context.textBaseline = "middle";
  return { context, width, ink: getComputedStyle(canvas).color };
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} words
 * @param {number} x
 * @param {number} y
 * @param {string} ink
 * @param {CanvasTextAlign} align
 */
export function write(context, words, x, y, ink, align) {
  context.fillStyle = ink;
  context.textAlign = align;
  context.fillText(words, x, y);
}

/**
 * A straight line.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} toX
 * @param {number} toY
 * @param {string} ink
 * @param {number} alpha
 */
export function rule(context, x, y, toX, toY, ink, alpha) {
  context.globalAlpha = alpha;
  context.strokeStyle = ink;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
}

/**
 * A line, of each column of pixels what is lowest and highest; a gap where it is not finite.
 * @param {CanvasRenderingContext2D} context
 * @param {Line} line
 * @param {Scale} scale
 * @param {[number, number]} range
 * @param {string} color
 * @param {number[]} dashes
 * @param {number} alpha
 * @param {number} thickness
 */
function stroke(context, line, scale, range, color, dashes, alpha, thickness) {
  context.globalAlpha = alpha;
  context.strokeStyle = color;
  context.lineWidth = thickness;
  context.lineCap = dashes.length ? "butt" : "round"; // a single point is a dot
  context.setLineDash(dashes.map((length) => length * thickness));
  context.beginPath();
  const first = Math.max(0, firstFrom(line, range[0]) - 1);
  const until = Math.min(line.n, firstFrom(line, range[1]) + 1);
  let column = NaN;
  let [low, high, last] = [0, 0, 0];
  let isDown = false;
  const flush = () => {
    if (Number.isNaN(column)) return;
    if (low !== high) {
      context.lineTo(column, low);
      context.lineTo(column, high);
    }
    context.lineTo(column, last);
  };
  for (let at = first; at < until; at += 1) {
    const y = line.y[at];
    if (!Number.isFinite(y) || (scale.isLog && y <= 0)) {
      flush();
      [column, isDown] = [NaN, false];
      continue;
    }
    const [x, place] = [Math.round(2 * scale.x(line.x[at])) / 2, scale.y(y)];
    if (x === column) {
      [low, high, last] = [Math.min(low, place), Math.max(high, place), place];
      continue;
    }
    flush();
    if (!isDown) context.moveTo(x, place);
    [column, low, high, last, isDown] = [x, place, place, place, true];
  }
  flush();
  context.stroke();
  if (until - first === 1 || line.n === 1) {
    context.fillStyle = color;
    context.fillRect(scale.x(line.x[first]) - 2, scale.y(line.y[first]) - 2, 4, 4);
  }
  context.globalAlpha = 1;
  context.setLineDash([]);
}
