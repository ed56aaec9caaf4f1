// What was started from a page: loading, unloading, pulling, with progress.
import { bytes, duration } from "./format.js";
import { html } from "./html.js";
import { isLive, jobs, start } from "./live.js";
import { Action, Bar } from "./parts.js";

const KINDS = { load: "Load", unload: "Unload", pull: "Pull" };
const BADGES = { running: "idle", done: "good", failed: "bad", cancelled: "warn" };

/** All jobs, or none at all while nothing was started. */
export function JobList({ all = false }) {
  const shown = all ? jobs.value : jobs.value.filter(({ state }) => state === "running");
  if (!shown.length) return null;
  return html`
    <section aria-labelledby="jobs-title">
      <h2 id="jobs-title">Jobs</h2>
      <ul class="requests">${shown.map((one) => html`<${Job} key=${one.id} one=${one} />`)}</ul>
    </section>
  `;
}

function Job({ one }) {
  const what = `${KINDS[one.kind] ?? one.kind} ${one.model ?? ""}`;
  const share = one.total_bytes ? one.done_bytes / one.total_bytes : null;
  const isCount = one.phase === "measuring";
  const figure = (n) => (isCount ? n : bytes(n));
  return html`
    <li class="card request">
      <span class="what">
        <b>${what}</b> <span class=${`badge ${BADGES[one.state] ?? "idle"}`}>${one.state}</span>
        <span class="quiet"> ${one.phase} ${duration(one.age_s)}</span>
      </span>
      ${one.state === "running" && html`<${Bar} share=${share} label=${what} />`}
      ${one.total_bytes > 0 &&
      html`<span class="figures">${figure(one.done_bytes)} of ${figure(one.total_bytes)}</span>`}
      ${one.error &&
      html`<span class="failure" role="alert">${one.error}${one.remedy && ` (${one.remedy})`}</span>`}
      ${one.state === "running" &&
      html`<${Action}
        label="Cancel"
        name=${`Cancel: ${what}`}
        act=${() => start(`jobs/${encodeURIComponent(one.id)}/cancel`)}
        disabled=${!isLive.value}
      />`}
    </li>
  `;
}
