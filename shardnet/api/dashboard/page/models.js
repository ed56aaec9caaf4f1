// The models of the cluster, what is done with them, and what the ring would be.
import { askJson, explain } from "./api.js";
import { bytes } from "./format.js";
import { Household, watchHousehold } from "./household.js";
import { computed, effect, html, signal, useEffect, useState } from "./html.js";
import { JobList } from "./jobs.js";
import { isLive, jobs, ring, start } from "./live.js";
import { Action, Nothing } from "./parts.js";
import { Plan } from "./plan.js";

export const listed = signal({ state: "never", models: [], silent: [], why: "" });

export async function listModels() {
  listed.value = { ...listed.value, state: "running", why: "" };
  try {
    const { models, silent } = await askJson("dashboard/api/models");
    listed.value = { state: "done", models, silent, why: "" };
  } catch (error) {
    listed.value = { ...listed.value, state: "failed", why: explain(error) };
  }
}

export function Models() {
  const { state, models, silent, why } = listed.value;
  const [part, setPart] = useState("");
  if (state === "never") queueMicrotask(listModels);
  useEffect(watchHousehold, []);
  const found = models.filter(({ name }) => name.toLowerCase().includes(part.toLowerCase()));
  return html`
    <section aria-labelledby="models-title" aria-busy=${state === "running"}>
      <div class="heading">
        <h1 id="models-title">Models</h1>
        <button type="button" disabled=${state === "running"} onClick=${listModels}>
          ${state === "running" ? "Looking…" : "Look again"}
        </button>
      </div>
      <${Pull} />
      ${why && html`<p class="failure" role="alert">${why}</p>`}
      ${models.length > 8 &&
      html`<label>
        Part of a name
        <input type="search" value=${part} onInput=${(event) => setPart(event.target.value)} />
      </label>`}
      <ul class="models">${found.map((one) => html`<${Model} key=${one.name} one=${one} />`)}</ul>
      ${state === "done" && !found.length && html`<${Nothing}>There is no such model.<//>`}
      ${silent.map((one) => html`<p class="failure" key=${one.node}>${one.name}: ${one.why}</p>`)}
    </section>
    <${Household} models=${models.filter((one) => one.failure == null)} />
    <${JobList} all />
    <${Plan} models=${models} />
  `;
}

function Model({ one }) {
  const facts = [
    one.family,
    one.form,
    one.size_bytes != null && bytes(one.size_bytes),
    one.context && `context ${one.context}`,
    one.fits === false && "does not fit into the memory of the nodes",
  ];
  return html`
    <li class="card model">
      <span class="what">
        <b>${one.name}</b>
        ${one.is_loaded && html` <span class="badge good">loaded</span>`}
        ${one.is_default && html` <span class="badge idle">default</span>`}
      </span>
      <span class=${one.fits === false ? "failure" : "quiet"}>${facts.filter(Boolean).join(", ")}</span>
      <span class="quiet">
        ${one.nodes.map(({ name, store }) => `${name} (${store})`).join(", ")}
      </span>
      ${one.failure && html`<span class="failure">${one.failure}</span>`}
      ${one.is_served &&
      (one.is_loaded
        ? html`<${Action}
            label="Unload"
            name=${`Unload ${one.name}`}
            act=${() => start("unload")}
            disabled=${!isLive.value}
          />`
        : html`<${Action}
            label="Load"
            name=${`Load ${one.name}`}
            act=${() => start("load", { model: one.name })}
            disabled=${!isLive.value || one.failure != null}
          />`)}
    </li>
  `;
}

/** What changes the list: a job that ended, another model on the ring. */
const changes = computed(() => [
  ring.value?.model,
  ...jobs.value.filter(({ state }) => state !== "running").map(({ id }) => id),
].join());
effect(() => {
  changes.value;
  if (listed.peek().state === "done") listModels();
});

function Pull() {
  const [name, setName] = useState("");
  const pull = () => start("pull", { model: name.trim() });
  return html`
    <div class="row fields">
      <label>
        Fetch a model of the Hugging Face Hub
        <input
          value=${name}
          placeholder="ORG/NAME"
          spellcheck=${false}
          autocapitalize="off"
          onInput=${(event) => setName(event.target.value)}
        />
      </label>
      <${Action} label="Pull" act=${pull} disabled=${!isLive.value || !name.trim()} />
    </div>
  `;
}
