// The ring as it is: the drawing, the speed, the strip of steps, what runs, and every node.
import { bytes, duration, layers, milliseconds, percent, rate, waiting } from "./format.js";
import { html } from "./html.js";
import { connection, history, isLive, nameOf, nodes, now, rates, ring, start } from "./live.js";
import { Action, Bar, Nothing } from "./parts.js";
import { JobList } from "./jobs.js";
import { RequestList } from "./requests.js";
import { RingDrawing } from "./ring_drawing.js";
import { Strip } from "./strip.js";

const STATES = {
  up: ["up", "good"],
  draining: ["draining", "warn"],
  resting: ["resting", "warn"],
  asleep: ["asleep", "warn"],
  silent: ["silent", "warn"],
  lost: ["lost", "bad"],
  refused: ["refused", "warn"],
};

const WHY = { draining: "It gives its layers to other nodes" };

export function Overview() {
  return html`
    <h1 class="unseen">Ring</h1>
    <div class="columns">
      <section class="card" aria-labelledby="ring-title"><${TheRing} /></section>
      <section class="card" aria-labelledby="speed-title"><${Speed} /></section>
    </div>
    <${JobList} />
    <section aria-labelledby="running-title">
      <h2 id="running-title">Running requests</h2>
      <${RequestList} />
    </section>
    <section aria-labelledby="nodes-title">
      <h2 id="nodes-title">Nodes</h2>
      ${!nodes.value.length && html`<${Nothing}>No node is known yet.<//>`}
      <ul class="nodes">${nodes.value.map((one) => html`<${Node} key=${one.node} one=${one} />`)}</ul>
    </section>
  `;
}

function TheRing() {
  const { value } = ring;
  if (!value) {
    return html`<h2 id="ring-title">No model is loaded</h2>
      <${Nothing}>A request loads the one it names. <a href="#models">Choose one</a>.<//>`;
  }
  return html`
    <div class="heading">
      <h2 id="ring-title">${value.model}</h2>
      <span class=${`badge ${value.state === "ready" ? "good" : "bad"}`}>${value.state}</span>
      <${Action} label="Unload" act=${() => start("unload")} disabled=${!isLive.value} />
    </div>
    ${value.waits_for && html`<p>${waiting(value.waits_for, value.expected_s)}</p>`}
    <${RingDrawing} />
    <p class="quiet">
      Context ${value.context}, computed in ${value.dtype}${value.quant && `, ${value.quant}`}, sent in
      ${" "}${value.wire_dtype}${value.predicted_tok_s != null &&
      `, predicted ${rate(value.predicted_tok_s)}`}.
    </p>
    <p class="quiet sentence">${value.why}</p>
    ${value.rings.length > 0 && html`<ul>${value.rings.map((one) => html`<li>
      <b>${one.names.join(" + ")}</b>: ${one.why || `${one.n_requests} requests`}${
        one.n_taken_over > 0 && `, ${one.n_taken_over} taken over`}</li>`)}</ul>`}
    ${value.drafters.map((one) => html`<p class="quiet" title=${one.why}>
      Drafts by ${one.drafter} on ${one.node}: ${one.n_accepted} of ${one.n_drafted} right,
      ${" "}${(one.n_tokens / Math.max(1, one.n_steps)).toFixed(2)} tokens a step.
    </p>`)}
    ${value.left_out.length > 0 &&
    html`<details>
      <summary>Not used: ${value.left_out.map(({ name }) => name).join(", ")}</summary>
      <ul>${value.left_out.map((one) => html`<li><b>${one.name}</b>: ${one.why}</li>`)}</ul>
    </details>`}
  `;
}

function Speed() {
  const told = isLive.value ? rates.value : null;
  return html`
    <h2 id="speed-title">Speed</h2>
    <p class="speeds">
      <span><b>${told ? rate(told.tokens_per_s) : "–"}</b> written</span>
      <span><b>${told ? rate(told.prefill_tokens_per_s) : "–"}</b> read</span>
      <span><b>${told ? milliseconds(told.round_trip_ms) : "–"}</b> a trip</span>
    </p>
    <${Curve} />
    <${Strip} />
    <${StageTable} />
  `;
}

const CURVE = { width: 400, height: 56, spanMs: 120_000 };

/** Tokens a second of the last two minutes. */
function Curve() {
  const points = history.value;
  const most = Math.max(1, ...points.map(({ value }) => value));
  const endMs = now.value;
  const at = ({ atMs, value }) => {
    const x = CURVE.width * (1 - (endMs - atMs) / CURVE.spanMs);
    return `${x.toFixed(1)},${(CURVE.height - 2 - (value / most) * (CURVE.height - 6)).toFixed(1)}`;
  };
  return html`
    <svg
      class="curve"
      role="img"
      viewBox="0 0 ${CURVE.width} ${CURVE.height}"
      preserveAspectRatio="none"
      aria-label=${`Tokens a second over the last two minutes, at most ${rate(most)}`}
    >
      <polyline points=${points.filter(({ atMs }) => atMs > endMs - CURVE.spanMs).map(at).join(" ")} />
    </svg>
  `;
}

function StageTable() {
  const stages = ring.value?.stages ?? [];
  if (!stages.length) return null;
  return html`
    <div class="scrolls" tabindex="0" role="group" aria-label="Stages, means of ten seconds">
      <table>
        <thead>
          <tr><th>Stage</th><th>Layers</th><th>Compute</th><th>Queue</th><th>Wire</th><th>Busy</th></tr>
        </thead>
        <tbody>
          ${stages.map(
            (one) => html`
              <tr key=${one.rank}>
                <th scope="row">${one.name}</th>
                <td>${one.layers[0]}–${one.layers[1]}</td>
                <td>${milliseconds(one.compute_ms)}</td>
                <td>${milliseconds(one.queue_ms)}</td>
                <td>${milliseconds(one.wire_ms)}</td>
                <td>${one.busy == null ? "–" : percent(one.busy)}</td>
              </tr>
            `,
          )}
        </tbody>
      </table>
    </div>
  `;
}

function Node({ one }) {
  const [word, kind] = STATES[one.state] ?? [one.state, "idle"];
  const isStale = connection.value.state === "lost";
  const used = Math.max(0, one.memory_bytes - one.memory_free_bytes);
  return html`
    <li class=${`card node ${one.state}${isStale ? " stale" : ""}`} data-node=${one.name}>
      <div class="heading">
        <h3>${one.name}</h3>
        <span class=${`badge ${kind}`}>${word}</span>
        ${one.is_asked && html`<span class="quiet">serves this page</span>`}
      </div>
      ${one.state !== "up" &&
      html`<p class="failure">${one.why ?? WHY[one.state] ?? "It does not answer"}, for ${duration(one.since_s)}</p>`}
      ${one.memory_bytes != null &&
      one.memory_free_bytes != null &&
      html`
        <p class="figures">${bytes(used)} of ${bytes(one.memory_bytes)} of memory used</p>
        <${Bar} share=${used / one.memory_bytes} label=${`Memory of ${one.name}`} />
      `}
      ${one.layers &&
      html`<p>
        ${layers(one.layers)} of ${one.model}, ${bytes(one.weight_bytes)}${one.dtype && ` in ${one.dtype}`}
      </p>`}
      ${one.parts?.map(
        (part) => html`<p class="figures">
          ${part.devices.join(" + ")}: ${layers(part.layers)}, ${bytes(part.weight_bytes)}
        </p>`,
      )}
      ${one.standby &&
      html`<p class="figures">
        ${one.standby.weight_bytes ? "Stands by for" : "Follows"} ${one.standby.name} with
        ${layers(one.standby.layers)}, ${one.standby.weight_bytes ? bytes(one.standby.weight_bytes) : "KV cache"}
      </p>`}
      ${one.wrong_bits && html`<p class="figures">It computed wrong bits: ${one.wrong_bits}</p>`}
      ${one.deputy && html`<p class="figures">Its answers are copied to ${one.deputy}</p>`}
      ${one.deputy_of?.map(
        (head) => html`<p class="figures">Goes on with the answers of ${head}, if that is lost</p>`,
      )}
      ${one.kv_positions > 0 &&
      html`
        <p class="figures">${one.kv_used_positions ?? 0} of ${one.kv_positions} positions of KV cache</p>
        <${Bar}
          share=${(one.kv_used_positions ?? 0) / one.kv_positions}
          label=${`KV cache of ${one.name}`}
          kind="second"
        />
      `}
      <dl>
        <dt>Device</dt><dd>${one.device}${one.isa && ` (${one.isa})`}</dd>
        ${one.temperature_c != null &&
        html`<dt>Temperature</dt><dd class=${one.temperature_c >= 85 ? "hot" : ""}>
          ${one.temperature_c.toFixed(0)} °C
        </dd>`}
        ${one.power?.map(
          ({ source, watts }) => html`<dt>Power</dt><dd>${watts?.toFixed(0) ?? "–"} W (${source})</dd>`,
        )}
        ${one.threads != null && html`<dt>Threads</dt><dd>${one.threads} of ${one.cores} cores</dd>`}
        <dt>Version</dt><dd>${one.version ?? "–"}, up for ${duration(one.uptime_s)}</dd>
        <dt>Address</dt><dd>${one.address}</dd>
        ${one.links?.length > 0 &&
        html`<dt>Links</dt><dd>
          ${one.links.map(({ node, rtt_ms }) => `${nameOf(node)} ${milliseconds(rtt_ms)}`).join(", ")}
        </dd>`}
      </dl>
    </li>
  `;
}
