// The requests that the ring has in hand, with how far each is.
import { duration, waiting } from "./format.js";
import { html } from "./html.js";
import { isLive, requests, ring, start, usage } from "./live.js";
import { Action, Bar, Nothing } from "./parts.js";

export function Requests() {
  const load = ring.value?.load;
  return html`
    <section aria-labelledby="requests-title">
      <h1 id="requests-title">Requests</h1>
      ${load &&
      html`<p class="quiet">
        ${load.running} running, ${load.waiting} waiting, ${load.paused} paused; ${load.warm_slots}
        ${" "}prompts kept warm; ${load.used_blocks} of ${load.room_blocks} blocks of the KV cache used
      </p>`}
      <${RequestList} />
      ${usage.value.length > 0 && html`<${Usage} />`}
    </section>
  `;
}

function Usage() {
  return html`
    <h2 id="usage-title">Tokens since the server began</h2>
    <div class="scrolls" tabindex="0" role="group" aria-label="Tokens by key and model">
      <table>
        <thead>
          <tr><th>Key</th><th>Model</th><th>Read</th><th>Kept</th><th>Written</th></tr>
        </thead>
        <tbody>
          ${usage.value.map(
            (one) => html`
              <tr key=${`${one.key} ${one.model}`}>
                <th scope="row">${one.key || "none"}</th>
                <td>${one.model}</td>
                <td>${one.n_prompt}</td>
                <td>${one.n_cached}</td>
                <td>${one.n_generated}</td>
              </tr>
            `,
          )}
        </tbody>
      </table>
    </div>
  `;
}

export function RequestList() {
  if (!requests.value.length) return html`<${Nothing}>No request runs.<//>`;
  return html`
    <ul class="requests">
      ${requests.value.map((one) => html`<${Request} key=${one.id} one=${one} />`)}
    </ul>
  `;
}

function Request({ one }) {
  const cancel = () => start(`requests/${encodeURIComponent(one.id)}/cancel`, {});
  return html`
    <li class="card request">
      <span class="what">
        <b>Request ${one.id}</b> <span class="quiet">${words(one)}, ${duration(one.age_s)}</span>
      </span>
      ${one.phase === "prefill"
        ? html`<${Bar}
            share=${one.n_prompt ? one.n_prefilled / one.n_prompt : 1}
            label=${`Request ${one.id}: prompt read`}
          />`
        : html`<${Bar}
            share=${one.max_tokens ? one.n_generated / one.max_tokens : null}
            label=${`Request ${one.id}: tokens written`}
            kind="second"
          />`}
      <span class="figures">
        ${one.n_prefilled} / ${one.n_prompt} read
        ${one.n_cached > 0 && html` (${one.n_cached} kept)`}, ${one.n_generated}
        ${one.max_tokens ? ` / ${one.max_tokens}` : ""} written
      </span>
      <${Action}
        label="Cancel"
        name=${`Cancel request ${one.id}`}
        act=${cancel}
        disabled=${!isLive.value}
      />
    </li>
  `;
}

function words({ state, phase, ahead, priority, waits_for, expected_s }) {
  const rank = priority ? `, priority ${priority}` : "";
  const waits = waits_for ? waiting(waits_for, expected_s) : "";
  if (state === "recovering")
    return `waits for the ring to recover${waits && `: ${waits}`}${rank}`;
  if (waits) return waits + rank;
  if (state === "paused") return `paused: makes room for others${rank}`;
  if (phase === "queued" || state === "queued") return `waits behind ${ahead}${rank}`;
  return (phase === "prefill" ? "reading the prompt" : "writing") + rank;
}
