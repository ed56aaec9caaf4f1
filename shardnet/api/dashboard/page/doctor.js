// What the doctor finds, on demand.
import { askJson, explain } from "./api.js";
import { html, signal } from "./html.js";
import { Nothing } from "./parts.js";

const WORDS = { problem: "Problem", info: "Note", ok: "Fine" };
const examined = signal({ state: "never", findings: [], why: "" });

async function examine() {
  examined.value = { ...examined.value, state: "running", why: "" };
  try {
    const { findings } = await askJson("dashboard/api/doctor");
    examined.value = { state: "done", findings, why: "" };
  } catch (error) {
    examined.value = { ...examined.value, state: "failed", why: explain(error) };
  }
}

export function Doctor() {
  const { state, findings, why } = examined.value;
  if (state === "never") queueMicrotask(examine);
  return html`
    <section aria-labelledby="doctor-title" aria-busy=${state === "running"}>
      <div class="heading">
        <h1 id="doctor-title">Doctor</h1>
        <button type="button" disabled=${state === "running"} onClick=${examine}>
          ${state === "running" ? "Examining…" : "Examine again"}
        </button>
      </div>
      <p class="quiet" role="status">
        ${state === "running" ? "This takes up to 10 seconds." : summary(state, findings)}
      </p>
      ${why && html`<p class="failure" role="alert">${why}</p>`}
      <ul class="findings">
        ${findings.map(
          (one) => html`
            <li class=${`card finding ${one.severity}`}>
              <p>
                <span class=${`badge ${kinds[one.severity] ?? "idle"}`}>
                  ${WORDS[one.severity] ?? one.severity}
                </span>
                ${" "}<b>${one.where || one.topic}</b> ${one.what}
              </p>
              ${one.remedy && html`<p class="remedy">${one.remedy}</p>`}
            </li>
          `,
        )}
      </ul>
      ${state === "done" && !findings.length && html`<${Nothing}>There is nothing to say.<//>`}
    </section>
  `;
}

const kinds = { problem: "bad", info: "warn", ok: "good" };

function summary(state, findings) {
  if (state !== "done") return "";
  const n = findings.filter(({ severity }) => severity === "problem").length;
  return n ? `${n} of ${findings.length} findings are problems.` : "No problems.";
}
