// The ring as a picture: a circle of stages, each with its node, layers and state.
import { milliseconds } from "./format.js";
import { html } from "./html.js";
import { connection, nodes, ring } from "./live.js";

const WIDTH = 420;
const HEIGHT = 300;
const RADII = [140, 104];
const CENTRE = [WIDTH / 2, HEIGHT / 2];
const DISC = 27;

export function RingDrawing() {
  const { stages, state } = ring.value;
  const placed = stages.map((stage, index) => ({ ...stage, at: place(index, stages.length) }));
  const stateOf = (id) => nodes.value.find(({ node }) => node === id)?.state ?? "lost";
  const isStale = connection.value.state === "lost";
  return html`
    <svg
      class=${`ring${isStale ? " stale" : ""}`}
      role="img"
      viewBox="0 0 ${WIDTH} ${HEIGHT}"
      aria-label=${describe(placed, stateOf, state)}
    >
      ${stages.length > 1 &&
      html`<ellipse cx=${CENTRE[0]} cy=${CENTRE[1]} rx=${RADII[0]} ry=${RADII[1]} class="way" />`}
      ${stages.length > 1 &&
      placed.map((one, index) => html`<${Hop} key=${one.rank} one=${one} index=${index} n=${stages.length} />`)}
      ${placed.map((one) => html`<${Disc} key=${one.rank} one=${one} state=${stateOf(one.node)} />`)}
    </svg>
  `;
}

function place(index, n) {
  const angle = (2 * Math.PI * index) / n - Math.PI / 2;
  return point(n === 1 ? null : angle);
}

const point = (angle) =>
  angle === null
    ? CENTRE
    : [CENTRE[0] + RADII[0] * Math.cos(angle), CENTRE[1] + RADII[1] * Math.sin(angle)];

/** The way to the next stage: an arrow head in its middle, and how long it takes. */
function Hop({ one, index, n }) {
  const angle = (2 * Math.PI * (index + 0.5)) / n - Math.PI / 2;
  const [x, y] = point(angle);
  const turn = (Math.atan2(RADII[1] * Math.cos(angle), -RADII[0] * Math.sin(angle)) * 180) / Math.PI;
  const inward = [CENTRE[0] + (x - CENTRE[0]) * 0.78, CENTRE[1] + (y - CENTRE[1]) * 0.78];
  return html`
    <path class="arrow" d="M-5,-5 L6,0 L-5,5 Z" transform=${`translate(${x},${y}) rotate(${turn})`} />
    ${one.wire_ms != null &&
    n < 9 &&
    html`<text class="small" x=${inward[0]} y=${inward[1]}>${milliseconds(one.wire_ms)}</text>`}
  `;
}

function Disc({ one, state }) {
  const [x, y] = one.at;
  return html`
    <g class=${`stage ${state}`} transform=${`translate(${x},${y})`}>
      <circle r=${DISC} />
      <text y="-3">${shortened(one.name)}</text>
      <text y="11" class="small">${one.layers[0]}–${one.layers[1]}</text>
      <text y=${DISC + 13} class="small">${state === "up" ? milliseconds(one.compute_ms) : state}</text>
    </g>
  `;
}

const shortened = (name) => (name.length > 8 ? `${name.slice(0, 7)}…` : name);

function describe(stages, stateOf, state) {
  const each = stages.map(
    ({ name, layers, node }) => `${name}, layers ${layers[0]} to ${layers[1] - 1}, ${stateOf(node)}`,
  );
  return `Ring, ${state}: ${each.join("; then ")}; then back to the first`;
}
