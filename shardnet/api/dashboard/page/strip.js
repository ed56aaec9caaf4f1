// The Gantt strip: what each stage computed in the last steps, and what was on its way between.
import { duration } from "./format.js";
import { html, useEffect, useRef } from "./html.js";
import { ring, steps } from "./live.js";
import { isSystemDark, theme } from "./theme.js";

const ROW = 20;
const GAP = 6;
const NAMES = 72;
const TRIPS = 30;
const SPANS_MS = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000];

export function Strip() {
  const canvas = useRef(null);
  const { steps: all, ring: id } = steps.value;
  const stages = ring.value?.id === id ? ring.value.stages : [];
  const spanMs = spanOf(all);
  const colours = `${theme.value} ${isSystemDark.value}`;
  const drawn = () => canvas.current && draw(canvas.current, all, stages, spanMs);
  useEffect(drawn, [all, stages, colours]);
  useEffect(() => {
    if (!canvas.current) return undefined;
    const watch = new ResizeObserver(drawn);
    watch.observe(canvas.current);
    return () => watch.disconnect();
  }, [all, stages]);
  if (!stages.length || !all.length) return html`<p class="nothing">No steps yet.</p>`;
  return html`
    <figure class="strip">
      <canvas
        ref=${canvas}
        role="img"
        height=${stages.length * (ROW + GAP)}
        aria-label=${`The last ${duration(spanMs / 1000)} of steps; the table below has the means`}
      ></canvas>
      <figcaption>
        The last ${duration(spanMs / 1000)}: <span class="key compute"></span> compute,
        ${" "}<span class="key prompt"></span> compute for prompts,
        ${" "}<span class="key wire"></span> wire and waiting
      </figcaption>
    </figure>
  `;
}

/** Choose how much to show: about so many trips. */
function spanOf(all) {
  const trips = all.slice(-TRIPS).map((one) => one.round_trip_ms).sort((a, b) => a - b);
  const wanted = TRIPS * (trips[Math.floor(trips.length / 2)] ?? 0);
  return SPANS_MS.find((span) => span >= wanted) ?? SPANS_MS.at(-1);
}

function draw(canvas, all, stages, spanMs) {
  const width = canvas.clientWidth;
  const height = stages.length * (ROW + GAP);
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  // A canvas knows no variables of CSS: the legend has the colours as they are now.
  const legend = canvas.nextElementSibling;
  const style = getComputedStyle(legend);
  const colour = (name) => getComputedStyle(legend.querySelector(`.${name}`)).backgroundColor;
  const colours = { compute: colour("compute"), prompt: colour("prompt"), wire: colour("wire") };
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = `12px ${style.fontFamily}`;
  context.textBaseline = "middle";
  const endMs = Math.max(...all.map((one) => one.sent_ms + one.round_trip_ms));
  const x = (ms) => NAMES + (width - NAMES) * (1 - (endMs - ms) / spanMs);
  const bar = (rank, fromMs, toMs, name, inset) => {
    const from = Math.max(NAMES, x(fromMs));
    const row = stages.findIndex((stage) => stage.rank === rank);
    if (row < 0 || x(toMs) <= NAMES) return;
    context.fillStyle = colours[name];
    const long = Math.max(0.5, x(toMs) - from);
    context.fillRect(from, row * (ROW + GAP) + inset, long, ROW - 2 * inset);
  };
  for (const [row, stage] of stages.entries()) {
    context.fillStyle = style.color;
    context.fillText(stage.name.slice(0, 10), 0, row * (ROW + GAP) + ROW / 2, NAMES - 6);
  }
  for (const step of all) {
    if (step.sent_ms + step.round_trip_ms < endMs - spanMs) continue;
    const inOrder = [...step.stages].sort((a, b) => a.rank - b.rank);
    for (const [index, one] of inOrder.entries()) {
      const fromMs = step.sent_ms + one.start_ms;
      const next = inOrder[index + 1];
      const untilMs = step.sent_ms + (next ? next.start_ms : step.round_trip_ms);
      bar(one.rank, fromMs + one.compute_ms, untilMs, "wire", 7);
      bar(one.rank, fromMs, fromMs + one.compute_ms, step.prompt_rows ? "prompt" : "compute", 0);
    }
  }
}
