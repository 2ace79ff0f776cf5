// Numbers as people read them, and the ticks of an axis. Pure.

/**
 * Three digits, thousands separated; tiny and huge numbers with an exponent.
 * @param {number} value
 */
export function figure(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

/** @param {number} bytes */
export function sizeOf(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const place = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3));
  return `${figure(bytes / 1000 ** place)} ${units[place]}`;
}

/** @param {number} step */
export function whole(step) {
  return Math.round(step).toLocaleString("en-US");
}

/**
 * Round values of an axis, at most about `most` of them.
 * @param {number} low
 * @param {number} high
 * @param {number} most
 * @param {boolean} isLog
 */
export function ticks(low, high, most, isLog) {
  if (!(high > low)) return [];
  if (isLog) {
    const found = [];
    for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power += 1) {
      found.push(10 ** power);
    }
    if (found.length > 1) {
      const every = Math.ceil(found.length / most);
      return found.filter((_, place) => place % every === 0);
    }
  }
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const gap = power * ([1, 2, 5, 10].find((lead) => lead * power >= rough) ?? 10);
  const found = [];
  for (let place = Math.ceil(low / gap); place * gap <= high * (1 + 1e-9); place += 1) {
    found.push(place * gap);
  }
  return found;
}

/**
 * A short label of a tick: 0.5, 20, 12k.
 * @param {number} value
 */
export function tickLabel(value) {
  const short = Number(value.toPrecision(7));
  if (short !== 0 && Math.abs(short) < 1e-3) return short.toExponential();
  return Math.abs(short) >= 10_000 ? `${Number((short / 1000).toPrecision(7))}k` : String(short);
}

/**
 * The range worth showing of sorted finite values: whole, or without rare far spikes, which would
 * hide all else. The rule is that of the pictures (`scales.bulk_limits`).
 * @param {Float64Array} sorted
 * @param {number | null} floor A value that must be in the range.
 * @returns {[number, number] | null}
 */
export function limitsOf(sorted, floor) {
  if (!sorted.length) return null;
  let low = sorted[0];
  let high = sorted[sorted.length - 1];
  if (sorted.length >= 20) {
    const bulk = sorted[Math.floor(0.97 * (sorted.length - 1))];
    if (high - low > 4 * (bulk - low) && bulk > low) high = low + 1.6 * (bulk - low);
  }
  if (floor !== null) [low, high] = [Math.min(low, floor), Math.max(high, floor)];
  const air = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low === floor ? low : low - air, high + air];
}
