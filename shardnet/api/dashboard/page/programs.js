// Ready settings for the programs that people use with a model.
import { askJson, explain, key, urlOf } from "./api.js";
import { html, signal, useEffect } from "./html.js";
import { server } from "./live.js";
import { Copied } from "./parts.js";

const told = signal({ programs: [], why: "" });
const fields = signal({ url: urlOf(".").replace(/\/$/, ""), model: "", withKey: false });

async function fetchPrograms({ url, model, withKey }) {
  try {
    const body = { url, model, api_key: withKey ? key.value : "" };
    const { programs } = await askJson("dashboard/api/programs", { body });
    told.value = { programs, why: "" };
  } catch (error) {
    told.value = { ...told.value, why: explain(error) };
  }
}

export function Programs() {
  const { url, model, withKey } = fields.value;
  const { programs, why } = told.value;
  const change = (change) => (fields.value = { ...fields.value, ...change });
  useEffect(() => {
    const timer = setTimeout(() => fetchPrograms(fields.value), 200);
    return () => clearTimeout(timer);
  }, [url, model, withKey, key.value]);
  return html`
    <section aria-labelledby="programs-title">
      <h1 id="programs-title">Programs</h1>
      <p class="quiet">
        Settings with which other programs talk to this ring. The same is told by
        <code> shardnet connect</code>.
      </p>
      <div class="row fields">
        <label>
          Address of this server
          <input type="url" value=${url} onInput=${(event) => change({ url: event.target.value })} />
        </label>
        <label>
          Model
          <input
            value=${model}
            placeholder=${server.value?.model ?? ""}
            onInput=${(event) => change({ model: event.target.value })}
          />
        </label>
        ${key.value &&
        html`<label class="check">
          <input
            type="checkbox"
            checked=${withKey}
            onChange=${(event) => change({ withKey: event.target.checked })}
          />
          ${" "}Write my key into them
        </label>`}
      </div>
      ${why && html`<p class="failure" role="alert">${why}</p>`}
      ${programs.map(
        (one) => html`
          <details class="card" key=${one.name}>
            <summary><b>${one.name}</b> <span class="quiet">${one.where}</span></summary>
            ${one.note && html`<p>${one.note}</p>`}
            <${Copied} text=${one.text} name=${`Settings for ${one.name}`} />
          </details>
        `,
      )}
    </section>
  `;
}
