// The models that answer side by side: how each is, where, and what it waits for.
import { askJson } from "./api.js";
import { bytes, count, rate } from "./format.js";
import { effect, html, signal, useState } from "./html.js";
import { isLive, now } from "./live.js";
import { Action } from "./parts.js";

const LOOK_MS = 2000;
const found = signal([]);
let lookedMs = 0;

const take = async (asked) => {
  found.value = (await asked).models;
};
const look = () => take(askJson("dashboard/api/household")).catch(() => {});

/** Look again while the page is open and the server is there. */
export function watchHousehold() {
  return effect(() => {
    if (!isLive.value || now.value - lookedMs < LOOK_MS) return;
    lookedMs = now.value;
    look();
  });
}

const drop = (name) =>
  take(askJson(`dashboard/api/household/${encodeURIComponent(name)}`, { method: "DELETE" }));

export function Household({ models }) {
  const states = found.value;
  return html`
    <section aria-labelledby="household-title">
      <h2 id="household-title">Side by side</h2>
      ${states.length > 0 &&
      html`<div class="scrolls" tabindex="0" role="group" aria-label="Models side by side">
        <table>
          <thead>
            <tr><th>Name</th><th>Model</th><th>State</th><th>Nodes</th><th>Predicted</th><td></td></tr>
          </thead>
          <tbody>${states.map((one) => html`<${Row} key=${one.model.name} one=${one} />`)}</tbody>
        </table>
      </div>`}
      <${Add} models=${models} />
    </section>
  `;
}

function Row({ one }) {
  const { name, kept, choice } = one.model;
  const busy = [
    one.n_requests > 0 && count(one.n_requests, "request"),
    one.n_waiting > 0 && `${one.n_waiting} waiting`,
    one.why,
  ];
  return html`
    <tr>
      <th scope="row">${name}${kept && html` <span class="badge idle">kept</span>`}</th>
      <td>${choice.model.split("/").slice(-2).join("/")}</td>
      <td>${[one.state, ...busy].filter(Boolean).join(", ")}</td>
      <td>${one.shares.map((share) => `${share.name} ${bytes(share.memory_bytes)}`).join(", ") || "–"}</td>
      <td>${rate(one.predicted_tok_s)}</td>
      <td><${Action} label="Remove" name=${`Remove ${name}`} act=${() => drop(name)} /></td>
    </tr>
  `;
}

function Add({ models }) {
  const [name, setName] = useState("");
  const [model, setModel] = useState("");
  const add = () => {
    const body = { name: name.trim(), model: model || models[0].name };
    return take(askJson("dashboard/api/household", { body })).then(() => setName(""));
  };
  return html`
    <div class="row fields">
      <label>
        Name that programs ask for
        <input value=${name} spellcheck=${false} onInput=${(event) => setName(event.target.value)} />
      </label>
      <label>
        Model
        <select value=${model} onChange=${(event) => setModel(event.target.value)}>
          ${models.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`)}
        </select>
      </label>
      <${Action}
        label="Answer for it too"
        act=${add}
        disabled=${!isLive.value || !name.trim() || !models.length}
      />
    </div>
  `;
}
