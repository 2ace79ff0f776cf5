// The time line of collectives: a lane a rank, on one clock; see lanes.py for what is in it.

import { figure, tickLabel, ticks, whole } from "./numbers.js";
import { make } from "./bars.js";
import { penOf, rule, write } from "./plot.js";

/** @typedef {[number, number, number, number, number | null]} Span Row, launch, begin, end, arrived. */
/** @typedef {{rank: number, spans: Span[], blocked: [number, number][]}} Lane */
/**
 * @typedef {object} TimeLine
 * @property {number} length
 * @property {[number, number, number][]} steps
 * @property {Lane[]} lanes
 * @property {number} left_out
 * @property {number} error
 */

const [LEFT, TOP, LANE, BOTTOM] = [56, 16, 44, 20];
const MOST_TRACKS = 4;

export class Timeline {
  /** @param {string[]} colors Of the rows of the table. @param {string} name */
  constructor(colors, name) {
    this.colors = colors;
    this.element = make("figure", "nb-plot nb-wide");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.tip = make("div", "nb-tip");
    this.tip.hidden = true;
    const title = make("figcaption", "", name);
    const legend = make("div", "nb-legend",
      "outlined: queueing · pale: waiting for the last rank · full: transferring · " +
      "line below: main thread blocked · numbers: those of the table · " +
      "blank between steps: what was not measured · drag: zoom, double-click: all of it");
    this.note = make("div", "nb-legend");
    this.element.append(title, legend, this.canvas, this.tip, this.note);
    /** @type {TimeLine | null} */
    this.line = null;
    /** @type {string[][]} */
    this.rows = [];
    /** @type {[number, number] | null} */
    this.zoom = null;
    /** @type {{box: number[], words: string[]}[]} */
    this.boxes = [];
    this.#listen();
  }

  /** @param {TimeLine | null} line @param {string[][]} rows Of the table. @param {string} sentence */
  show(line, rows, sentence) {
    [this.line, this.rows] = [line, rows];
    this.canvas.setAttribute("aria-label", sentence);
    const more = line?.left_out ? `Ranks that came last or waited most. ` : "";
    const error = line?.error ? `Clocks differ by at most ${figure(line.error)} ms. ` : "";
    this.note.textContent = `${more}${error}`;
    this.draw();
  }

  #listen() {
    let from = NaN;
    const at = (/** @type {PointerEvent} */ event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      this.#point(x, y);
    });
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("pointerdown", (event) => {
      [from] = at(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const [to] = at(event);
      if (Math.abs(to - from) > 4) this.#zoomTo([this.#msAt(from), this.#msAt(to)]);
    });
    this.canvas.addEventListener("dblclick", () => this.#zoomTo(null));
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#zoomTo(null);
    });
  }

  /** @param {[number, number] | null} range */
  #zoomTo(range) {
    this.zoom = range && /** @type {[number, number]} */ (range.toSorted((a, b) => a - b));
    this.draw();
  }

  get #range() {
    return this.zoom ?? [0, this.line?.length || 1];
  }

  /** @param {number} x */
  #msAt(x) {
    const [low, high] = this.#range;
    return low + ((x - LEFT) / (this.canvas.clientWidth - LEFT - 10)) * (high - low);
  }

  /** @param {number} x @param {number} y */
  #point(x, y) {
    const found = this.boxes.findLast(({ box: [left, top, right, low] }) =>
      left - 1 <= x && x <= right + 1 && top <= y && y <= low);
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.replaceChildren(...found.words.map((line) => make("div", "", line)));
    const width = this.canvas.clientWidth;
    this.tip.style.left = x < width / 2 ? `${x + 12}px` : "";
    this.tip.style.right = x < width / 2 ? "" : `${width - x + 12}px`;
  }

  draw() {
    const line = this.line;
    const lanes = line?.lanes ?? [];
    const height = TOP + LANE * lanes.length + BOTTOM;
    this.canvas.style.height = `${height}px`;
    const pen = penOf(this.canvas, height);
    this.boxes = [];
    if (!pen || !line) return;
    const { context, width, ink } = pen;
    const [low, high] = this.#range;
    const x = (/** @type {number} */ ms) => LEFT + ((ms - low) / (high - low)) * (width - LEFT - 10);
    for (const value of ticks(low, high, width / 90, false)) {
      rule(context, x(value), TOP, x(value), height - BOTTOM, ink, 0.15);
      write(context, tickLabel(value), x(value), height - BOTTOM + 10, ink, "center");
    }
    for (const [step, begin, end] of line.steps) {
      if (begin >= low && begin <= high) rule(context, x(begin), TOP, x(begin), height - BOTTOM, ink, 0.6);
      const middle = x((Math.max(begin, low) + Math.min(end, high)) / 2);
      if (end > low && begin < high) write(context, `step ${whole(step)}`, middle, 7, ink, "center");
    }
    context.save();
    lanes.forEach((lane, place) => {
      write(context, `rank ${lane.rank}`, LEFT - 6, TOP + LANE * (place + 0.5), ink, "right");
    });
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - 10, height);
    context.clip();
    lanes.forEach((lane, place) => this.#drawLane(context, lane, TOP + LANE * place, x, ink));
    context.restore();
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Lane} lane
   * @param {number} top
   * @param {(ms: number) => number} x
   * @param {string} ink
   */
  #drawLane(context, lane, top, x, ink) {
    const placed = tracksOf(lane.spans);
    const tall = (LANE - 14) / (1 + Math.max(0, ...placed));
    lane.spans.forEach((span, number) => {
      const [row, launch, begin, end, arrived] = span;
      const color = this.colors[row % this.colors.length];
      const moved = Math.min(Math.max(begin, arrived ?? begin), end);
      const [y, deep] = [top + 3 + placed[number] * tall, tall - 1.5];
      for (const [from, to, alpha] of [[launch, begin, 0], [begin, moved, 0.35], [moved, end, 1]]) {
        context.globalAlpha = alpha;
        context.fillStyle = color;
        context.fillRect(x(from), y, Math.max(0, x(to) - x(from)), deep);
      }
      context.globalAlpha = 1;
      context.strokeStyle = color;
      context.lineWidth = 1;
      context.strokeRect(x(launch), y, Math.max(0.5, x(end) - x(launch)), deep);
      if (x(end) - x(begin) > 10 * String(row + 1).length + 4) {
        write(context, String(row + 1), (x(begin) + x(end)) / 2, y + deep / 2, ink, "center");
      }
      this.boxes.push({
        box: [x(launch), y, x(end), y + deep],
        words: [
          `rank ${lane.rank}: ${row + 1}  ${this.rows[row]?.[1] ?? ""} ${this.rows[row]?.[5] ?? ""}`,
          `queued ${figure(begin - launch)} ms`,
          arrived === null ? "" : `waited ${figure(moved - begin)} ms for the last rank`,
          `${arrived === null ? "took" : "transferred"} ${figure(end - moved)} ms`,
        ].filter(Boolean),
      });
    });
    for (const [begin, end] of lane.blocked) {
      context.fillStyle = ink;
      context.fillRect(x(begin), top + LANE - 8, Math.max(1, x(end) - x(begin)), 2.5);
    }
  }
}

/** The track of each span: those that overlap lie above each other. @param {Span[]} spans */
export function tracksOf(spans) {
  /** @type {number[]} */
  const ends = [];
  return spans.map(([, launch, , end]) => {
    let track = ends.findIndex((until) => until <= launch);
    if (track < 0) track = ends.length < MOST_TRACKS ? ends.push(0) - 1 : ends.indexOf(Math.min(...ends));
    ends[track] = Math.max(ends[track], end);
    return track;
  });
}
