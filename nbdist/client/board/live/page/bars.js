// Bars as elements of the page: the parts of a step by rank, and one number by rank.

import { figure, whole } from "./numbers.js";

/** @typedef {{name: string, color: string, hatch: string, label: string}} Part */
/** @typedef {{ranks: number[], parts: Record<string, number[]>, waits: Record<string, [number, number]>}} Stack */

/**
 * Lying bars of a step's parts, a rank each, under the parts' names.
 * @param {Stack} stack
 * @param {Part[]} parts In the order in which they are stacked.
 * @param {number} most Ranks that are shown; of more, those with the longest steps.
 */
export function stepBars(stack, parts, most = 16) {
  const wholes = stack.ranks.map((_, place) =>
    Object.values(stack.parts).reduce((sum, of) => sum + of[place], 0));
  const longest = Math.max(...wholes, 1e-9);
  const seen = parts.filter(({ name }) =>
    stack.parts[name]?.some((value) => value > 0.004 * longest));
  const element = make("div", "nb-bars");
  element.append(legendOf(seen));
  let places = stack.ranks.map((_, place) => place);
  if (places.length > most) {
    places = places.toSorted((a, b) => wholes[b] - wholes[a]).slice(0, most).toSorted((a, b) => a - b);
  }
  for (const place of places) {
    const rank = stack.ranks[place];
    const row = make("div", "nb-row");
    row.append(make("span", "nb-name", `rank ${rank}`));
    const bar = make("div", "nb-bar");
    for (const { name, color, hatch, label } of seen) {
      const value = stack.parts[name][place];
      if (!(value > 0)) continue;
      const piece = make("div", "nb-piece");
      piece.style.width = `${(100 * value) / longest}%`;
      piece.style.background = `${hatched(hatch)} ${color}`;
      piece.title = `rank ${rank}: ${label} ${figure(value)} ms`;
      bar.append(piece);
    }
    const waits = stack.waits[rank];
    const words = waits ? `, ${figure(waits[1])} waiting for rank ${waits[0]}` : "";
    row.append(bar, make("span", "nb-value", `${figure(wholes[place])} ms${words}`));
    element.append(row);
  }
  if (places.length < stack.ranks.length) {
    element.append(make("div", "", `${places.length} of ${stack.ranks.length} ranks: the longest.`));
  }
  return element;
}

/** @param {Part[]} parts */
function legendOf(parts) {
  const legend = make("div", "nb-legend");
  for (const { color, hatch, label } of parts) {
    const sample = make("span", "nb-sample");
    sample.style.background = `${hatched(hatch)} ${color}`;
    const entry = make("span", "nb-entry");
    entry.append(sample, label);
    legend.append(entry);
  }
  return legend;
}

/** A second sign beside the colour. @param {string} hatch */
function hatched(hatch) {
  const angle = { "/": 135, "\\": 45, "-": 0, "|": 90, "x": 135, ".": 45 }[hatch[0]];
  if (angle === undefined) return "";
  const line = "transparent 0 5px, rgba(255,255,255,0.35) 5px 7px";
  return `repeating-linear-gradient(${angle}deg, ${line}),`;
}

/**
 * One number by rank or link; those that are to blame in another colour.
 * @param {string} title
 * @param {{name: string, value: number, isBlamed: boolean, help: string}[]} rows
 * @param {(value: number) => string} written
 * @param {[string, string]} colors Of most, and of those to blame.
 */
export function plainBars(title, rows, written, colors) {
  const element = make("div", "nb-bars");
  element.append(make("div", "nb-head", title));
  const most = Math.max(...rows.map(({ value }) => value), 1e-9);
  for (const { name, value, isBlamed, help } of rows) {
    const row = make("div", "nb-row");
    const bar = make("div", "nb-bar");
    const piece = make("div", "nb-piece");
    piece.style.width = `${(100 * value) / most}%`;
    piece.style.background = colors[isBlamed ? 1 : 0];
    bar.append(piece);
    row.title = help;
    row.append(make("span", "nb-name", name), bar, make("span", "nb-value", written(value)));
    element.append(row);
  }
  return element;
}

/**
 * The tokens of each rank's experts: a strip for each mixture, shaded up to its own most.
 * @param {{title: string, of: [number, number][], rows: [string, (number | null)[]][]}} experts
 * @param {string} color
 */
export function expertStrips({ title, of, rows }, color) {
  const element = make("div", "nb-bars nb-strips");
  element.append(make("div", "nb-head", title));
  const part = Math.round(100 / of.length * 1e4) / 1e4;
  for (const [name, tokens] of rows) {
    const row = make("div", "nb-row");
    const bar = make("div", "nb-bar");
    const most = Math.max(...tokens.map((value) => value ?? 0));
    tokens.forEach((value, place) => {
      const [rank, expert] = of[place];
      const piece = make("div", "nb-piece");
      piece.style.width = `${part}%`;
      if (place && of[place - 1][0] !== rank) piece.classList.add("nb-next-rank");
      if (value !== null) {
        const share = most ? value / most : 0;
        piece.style.background = `color-mix(in srgb, ${color} ${10 + 90 * share}%, transparent)`;
        piece.title = `expert ${expert} on rank ${rank}: ${whole(value)} tokens`;
      }
      bar.append(piece);
    });
    const [rank, expert] = of[Math.max(tokens.indexOf(most), 0)];
    const said = `most ${whole(most)}: rank ${rank}, expert ${expert}`;
    row.append(make("span", "nb-name", name), bar, make("span", "nb-value", said));
    element.append(row);
  }
  const ranks = [...new Set(of.map(([rank]) => rank))].map((rank) => `rank ${rank}`);
  element.append(make("div", "nb-under", `from left to right: ${ranks.join(", ")}`));
  return element;
}

/**
 * An element with a class and words.
 * @param {string} tag
 * @param {string} className
 * @param {string} [words]
 */
export function make(tag, className, words) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (words !== undefined) element.textContent = words;
  return element;
}
