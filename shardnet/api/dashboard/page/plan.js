// What the ring would be with or without some nodes. Nothing is loaded for it.
import { askJson, explain } from "./api.js";
import { bytes, milliseconds, rate } from "./format.js";
import { html, signal } from "./html.js";
import { isLive, nodes } from "./live.js";
import { Action } from "./parts.js";

const MOST_PLANS = 8;

const wanted = signal({ model: "", leaveOut: [] });
/** The plans that were asked for, the last one first: {label, plan} or {label, why}. */
const plans = signal([]);

async function preview() {
  const { model, leaveOut } = wanted.value;
  const names = nodes.value.filter(({ node }) => leaveOut.includes(node)).map(({ name }) => name);
  const label = `${model || "default model"}, ${names.length ? `without ${names.join(", ")}` : "all nodes"}`;
  let made;
  try {
    const plan = await askJson("dashboard/api/plan", { body: { model, leave_out: leaveOut } });
    made = { label, plan };
  } catch (error) {
    made = { label, why: explain(error) };
  }
  const others = plans.value.filter((one) => one.label !== label);
  plans.value = [made, ...others].slice(0, MOST_PLANS);
}

export function Plan({ models }) {
  const { model, leaveOut } = wanted.value;
  const change = (change) => (wanted.value = { ...wanted.value, ...change });
  const use = (node, isUsed) =>
    change({ leaveOut: isUsed ? leaveOut.filter((id) => id !== node) : [...leaveOut, node] });
  return html`
    <section aria-labelledby="plan-title">
      <h2 id="plan-title">What would it be?</h2>
      <p class="quiet">
        The plan for a model with the nodes that are ticked. Measuring them may take a minute the
        first time.
      </p>
      <div class="row fields">
        <label>
          Model
          <select value=${model} onChange=${(event) => change({ model: event.target.value })}>
            <option value="">the default one</option>
            ${models
              .filter((one) => one.is_served)
              .map((one) => html`<option value=${one.name}>${one.name}</option>`)}
          </select>
        </label>
        <fieldset>
          <legend>Nodes</legend>
          ${nodes.value
            .filter(({ state }) => state === "up")
            .map(
              ({ node, name }) => html`
                <label class="check" key=${node}>
                  <input
                    type="checkbox"
                    checked=${!leaveOut.includes(node)}
                    onChange=${(event) => use(node, event.target.checked)}
                  />
                  ${" "}${name}
                </label>
              `,
            )}
        </fieldset>
        <${Action} label="Preview" kind="main" act=${preview} disabled=${!isLive.value} />
      </div>
      <ul class="plans" aria-live="polite">
        ${plans.value.map((one) => html`<${Preview} key=${one.label} one=${one} />`)}
      </ul>
    </section>
  `;
}

function Preview({ one: { label, plan, why } }) {
  if (!plan) return html`<li class="card"><b>${label}</b><p class="failure">${why}</p></li>`;
  return html`
    <li class="card">
      <div class="heading">
        <h3>${label}</h3>
        <b>${plan.predicted_tok_s == null ? "speed not known" : rate(plan.predicted_tok_s)}</b>
      </div>
      <div class="scrolls" tabindex="0" role="group" aria-label=${`Stages: ${label}`}>
        <table>
          <thead>
            <tr><th>Node</th><th>Layers</th><th>Weights</th><th>KV cache</th><th>Compute</th><th>To fetch</th></tr>
          </thead>
          <tbody>
            ${plan.stages.map(
              (stage) => html`
                <tr key=${stage.rank}>
                  <th scope="row">${stage.name}</th>
                  <td>${stage.layers[0]}–${stage.layers[1]}</td>
                  <td>${bytes(stage.weight_bytes)}</td>
                  <td>${bytes(stage.kv_bytes)}</td>
                  <td>${milliseconds(stage.compute_ms)}</td>
                  <td>${stage.fetch_bytes ? bytes(stage.fetch_bytes) : "nothing"}</td>
                </tr>
              `,
            )}
          </tbody>
        </table>
      </div>
      <p class="quiet">Context ${plan.context}.</p>
      <p class="quiet sentence">${plan.why}</p>
      ${plan.warnings.map((text) => html`<p class="failure">${text}</p>`)}
      ${plan.left_out.length > 0 &&
      html`<ul>${plan.left_out.map((out) => html`<li><b>${out.name}</b> is left out: ${out.why}</li>`)}</ul>`}
    </li>
  `;
}
