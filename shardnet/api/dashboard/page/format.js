// Figures as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Write a number of bytes in three figures. */
export function bytes(n) {
  if (n == null) return "–";
  let unit = 0;
  while (n >= 1000 && unit < UNITS.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit ? threeFigures(n) : n} ${UNITS[unit]}`;
}

/** Write a positive number in at most three figures. */
export function threeFigures(n) {
  return n >= 99.95 ? n.toFixed(0) : n >= 9.995 ? n.toFixed(1) : n.toFixed(2);
}

/** Write milliseconds. */
export const milliseconds = (n) => (n == null ? "–" : `${threeFigures(n)} ms`);

/** Write a rate in tokens a second. */
export const rate = (n) => (n == null ? "–" : `${n >= 99.95 ? n.toFixed(0) : n.toFixed(1)} tokens/s`);

/** Write seconds as the two largest units. */
export function duration(s) {
  if (s == null) return "–";
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.floor(s)} s`;
  const parts = [[Math.floor(s / 86400), "d"], [Math.floor(s / 3600) % 24, "h"], [Math.floor(s / 60) % 60, "min"], [Math.floor(s) % 60, "s"]];
  const first = parts.findIndex(([n]) => n);
  return parts.slice(first, first + 2).map(([n, unit]) => `${n} ${unit}`).join(" ");
}

/** Write what is waited for, and about how long if that is known. */
export const waiting = (what, s) => (s ? `${what}, about ${Math.ceil(s)} s` : what);

/** Write layers [first, end) as people count them. */
export const layers = ([first, end]) =>
  end - first === 1 ? `layer ${first}` : `layers ${first} to ${end - 1}`;

/** Write a share as whole percent. */
export const percent = (share) => `${Math.round(100 * share)} %`;

/** Write a number with its noun. */
export const count = (n, noun, many = `${noun}s`) => `${n} ${n === 1 ? noun : many}`;
