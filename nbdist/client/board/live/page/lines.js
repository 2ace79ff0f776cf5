// The lines that the kernel has sent: points by name and rank, as points.py describes them.

const MOST_POINTS = 16_000; // of a line, before it is thinned: 8 bytes each

/**
 * @typedef {{x: Float32Array, y: Float32Array, n: number, until: number, generation: number,
 *   isThinned: boolean, only: number | null}} Line `n` points that are filled; `until` is the
 *   kernel's place, `only` the step at which all was logged: then x counts records.
 * @typedef {[string, number, number, number, number, number]} Header
 */

/**
 * @typedef {{low: number, high: number, lost: string, lines: Lines}} Detail Points of a range,
 *   finer; `lost` says why some are not.
 */

export class Lines {
  /** @param {boolean} [isPart] Whether they are those of a range, and begin anywhere. */
  constructor(isPart = false) {
    /** @type {{key: string, line: Line} | null} */
    this.means = null;
    this.isPart = isPart;
    /** @type {Map<string, Map<number, Line>>} */
    this.named = new Map();
    /** @type {Detail | null} */
    this.detail = null;
    /** @type {Map<string, [number, number]>} Rank and step of the first value that is not finite. */
    this.odd = new Map();
  }

  /**
   * Takes pieces of lines.
   * @param {Header[]} headers
   * @param {DataView | null} data
   * @returns {boolean} Whether nothing is missing between what there is and these.
   */
  take(headers, data) {
    let at = data ? data.byteOffset : 0;
    let isWhole = true;
    for (const [name, rank, generation, first, until, count] of headers) {
      const buffer = /** @type {DataView} */ (data).buffer.slice(at, at + 8 * count);
      at += 8 * count;
      const x = new Float32Array(buffer, 0, count);
      const y = new Float32Array(buffer, 4 * count, count);
      isWhole = this.#put(name, rank, generation, first, until, x, y) && isWhole;
    }
    return isWhole;
  }

  /**
   * @param {string} name
   * @param {number} rank
   * @param {number} generation
   * @param {number} first
   * @param {number} until
   * @param {Float32Array} x
   * @param {Float32Array} y
   */
  #put(name, rank, generation, first, until, x, y) {
    const ofRanks = this.#of(name);
    let line = ofRanks.get(rank);
    if (!line || (first === 0 && (line.generation !== generation || until > line.until))) {
      line = emptyLine(generation);
      if (this.isPart) line.until = first;
      ofRanks.set(rank, line);
    }
    if (line.generation !== generation) return false;
    if (until <= line.until) return true;
    const known = line.until - first;
    if (known < 0 || known > x.length) return false;
    append(line, counted(line, x.subarray(known)), y.subarray(known));
    line.isThinned ||= x.length < until - first;
    line.until = until;
    if (!this.odd.has(name)) {
      const bad = y.findIndex((value) => !Number.isFinite(value));
      if (bad >= 0) this.odd.set(name, [rank, x[bad]]);
    }
    return true;
  }

  /** @param {string} name */
  #of(name) {
    let ofRanks = this.named.get(name);
    if (!ofRanks) this.named.set(name, (ofRanks = new Map()));
    return ofRanks;
  }

  /** @param {Detail | null} detail */
  show(detail) {
    [this.detail, this.means] = [detail, null];
  }

  /**
   * What is known of a range finer than of the whole; null where it does not cover it.
   * @param {[number, number]} [range]
   */
  finer(range) {
    const detail = this.detail;
    return range && detail && detail.low <= range[0] && range[1] <= detail.high ? detail : null;
  }

  /**
   * The lines of a name by rank; finer ones where they cover the range.
   * @param {string} name
   * @param {[number, number]} [range]
   * @returns {Map<number, Line>}
   */
  of(name, range) {
    const whole = this.named.get(name) ?? new Map();
    const finer = this.finer(range)?.lines.named.get(name);
    return finer ? new Map([...whole, ...finer]) : whole;
  }

  /**
   * The lines that tell what the steps of a range were made of, all at the same steps.
   * @param {[number, number]} [range]
   * @returns {Lines}
   */
  ofParts(range) {
    const finer = this.finer(range)?.lines;
    const hasParts = finer && [...finer.named.keys()].some((name) => name.startsWith("part."));
    return hasParts && !finer.isThinned ? finer : this;
  }

  /**
   * The mean of a name over the ranks, of the steps that all of them have; kept until points come.
   * @param {string} name
   * @param {[number, number]} [range]
   * @returns {Line}
   */
  mean(name, range) {
    const ofRanks = this.of(name, range);
    const until = [...ofRanks.values()].map((line) => `${line.generation}:${line.until}:${line.n}`);
    const key = [name, ...until].join();
    if (this.means?.key !== key) this.means = { key, line: meanOf([...ofRanks.values()]) };
    return this.means.line;
  }

  /** Rank and step of the first loss that is not finite; null while all are. */
  get notFinite() {
    return this.odd.get(this.lossName) ?? null;
  }

  /** Whether the loss is the user's own, or that which backward saw. */
  get lossName() {
    return this.named.has("log.loss") ? "log.loss" : "loss";
  }

  /** The first and the last step of all lines over steps. */
  get steps() {
    let [low, high] = [Infinity, -Infinity];
    for (const [name, ofRanks] of this.named) {
      if (name.startsWith("device.")) continue;
      for (const line of ofRanks.values()) {
        if (!line.n) continue;
        low = Math.min(low, line.x[0]);
        high = Math.max(high, line.x[line.n - 1]);
      }
    }
    return high >= low ? /** @type {[number, number]} */ ([low, high]) : null;
  }

  /** The step nearest to this one of which it is known what it was made of; null without one. */
  measuredNear(/** @type {number} */ step) {
    let best = null;
    for (const [name, ofRanks] of this.named) {
      if (!name.startsWith("part.")) continue;
      for (const line of ofRanks.values()) {
        const place = nearest(line, step);
        if (place < 0) continue;
        const x = line.x[place];
        if (best === null || Math.abs(x - step) < Math.abs(best - step)) best = x;
      }
    }
    return best;
  }

  /** Whether any line over steps has lost points. */
  get isThinned() {
    for (const ofRanks of this.named.values()) {
      for (const line of ofRanks.values()) if (line.isThinned) return true;
    }
    return false;
  }
}

/** @param {number} generation @returns {Line} */
function emptyLine(generation) {
  const [x, y] = [new Float32Array(256), new Float32Array(256)];
  return { x, y, n: 0, until: 0, generation, isThinned: false, only: null };
}

/**
 * New x of a line: numbers of records where nothing steps, and x tells nothing.
 * @param {Line} line
 * @param {Float32Array} x
 */
function counted(line, x) {
  const first = line.only ?? (line.n ? line.x[0] : x[0]);
  const isOne = line.n + x.length > 1 && x.every((step) => step === first);
  const wasOne = line.only !== null || line.n < 2 && (!line.n || line.x[0] === first);
  if (!isOne || !wasOne) return x;
  line.only = first;
  if (line.n === 1) line.x[0] = 1;
  return x.map((_, place) => line.n + place + 1);
}

/**
 * @param {Line} line
 * @param {Float32Array} x
 * @param {Float32Array} y
 */
function append(line, x, y) {
  const n = line.n + x.length;
  if (n > line.x.length) {
    const size = Math.max(n, 2 * line.x.length);
    [line.x, line.y] = [grown(line.x, size), grown(line.y, size)];
  }
  line.x.set(x, line.n);
  line.y.set(y, line.n);
  line.n = n;
  while (line.n > MOST_POINTS) thin(line);
}

/** @param {Float32Array} numbers @param {number} size */
function grown(numbers, size) {
  const larger = new Float32Array(size);
  larger.set(numbers);
  return larger;
}

/**
 * Leaves the least and the greatest of every four neighbours; one that is not finite stays.
 * @param {Line} line
 */
function thin(line) {
  let n = 0;
  const cut = line.n - (line.n % 4 || 4);
  for (let at = 0; at < cut; at += 4) {
    let [least, greatest] = [at, at];
    for (let i = at; i < at + 4; i += 1) {
      if (!Number.isFinite(line.y[i])) least = i;
      else if (line.y[i] < line.y[least]) least = i;
      else if (line.y[i] > line.y[greatest] || !Number.isFinite(line.y[greatest])) greatest = i;
    }
    const pair = least < greatest ? [least, greatest] : [greatest, least];
    for (const i of least === greatest ? [least] : pair) {
      [line.x[n], line.y[n]] = [line.x[i], line.y[i]];
      n += 1;
    }
  }
  line.x.copyWithin(n, cut, line.n);
  line.y.copyWithin(n, cut, line.n);
  line.n = n + line.n - cut;
  line.isThinned = true;
}

/**
 * The place of the point that is nearest to `x`; -1 of an empty line.
 * @param {Line} line
 * @param {number} x
 */
export function nearest(line, x) {
  if (!line.n) return -1;
  const after = firstFrom(line, x);
  if (after === 0) return 0;
  if (after === line.n) return line.n - 1;
  return x - line.x[after - 1] <= line.x[after] - x ? after - 1 : after;
}

/**
 * The place of the first point at `x` or behind it.
 * @param {Line} line
 * @param {number} x
 */
export function firstFrom(line, x) {
  let [low, high] = [0, line.n];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.x[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * What is known at just this step; null where nothing was measured.
 * @param {Line | undefined} line
 * @param {number} step
 */
export function valueAt(line, step) {
  if (!line) return null;
  const at = firstFrom(line, step);
  return at < line.n && line.x[at] === step ? line.y[at] : null;
}

/**
 * The norm of the whole gradient, of the steps whose share all ranks have told.
 * @param {Map<number, Line>} shares
 */
export function gradientNorm(shares) {
  return sumOf([...shares.values()], Math.sqrt);
}

/** The mean of lines, of the steps that all of them have. @param {Line[]} lines */
function meanOf(lines) {
  return sumOf(lines, (sum) => sum / lines.length);
}

/**
 * What `made` makes of the sum of lines, at the steps that all of them have.
 * @param {Line[]} lines
 * @param {(sum: number) => number} made
 * @returns {Line}
 */
function sumOf([first, ...others], made) {
  const line = emptyLine(0);
  if (!first) return line;
  line.isThinned = [first, ...others].some((one) => one.isThinned);
  /** @type {number[][]} */
  const [x, y] = [[], []];
  for (let at = 0; at < first.n; at += 1) {
    const values = others.map((other) => valueAt(other, first.x[at])).filter((value) => value !== null);
    if (values.length < others.length) continue;
    x.push(first.x[at]);
    y.push(made(values.reduce((sum, value) => sum + value, first.y[at])));
  }
  append(line, Float32Array.from(x), Float32Array.from(y));
  return line;
}
