// The chat: a conversation, and what sets how it goes on.
import { duration, rate } from "./format.js";
import { html, signal, useEffect, useRef, useState } from "./html.js";
import {
  FIELDS,
  clear,
  current,
  isRunning,
  kept,
  messages,
  note,
  open,
  parameters,
  retry,
  save,
  say,
  stop,
} from "./conversation.js";
import { Conversations } from "./conversations.js";
import { server } from "./live.js";
import { listModels, listed } from "./models.js";
import { Attached, Choose, Thumbnails, attached, target } from "./pictures.js";
import { Prose } from "./prose.js";
import { TokenHeat } from "./token_heat.js";

const MOST_DRAWN = 2000;

const draft = signal("");

export function Chat() {
  return html`
    <div class="chat">
      <h1 class="unseen">Chat</h1>
      <${Conversations} />
      <${Parameters} />
      <${Log} />
      <${Composer} />
    </div>
  `;
}

function Log() {
  const all = messages.value;
  const follows = useRef(true);
  useEffect(() => {
    const look = () => {
      const { scrollHeight, scrollTop, clientHeight } = document.documentElement;
      follows.current = scrollHeight - scrollTop - clientHeight < 80;
    };
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  useEffect(() => {
    if (follows.current && all.length) scrollTo(0, document.documentElement.scrollHeight);
  }, [all]);
  return html`
    <div class="log" role="log" aria-label="Conversation" aria-busy=${isRunning.value}>
      ${!all.length &&
      html`<p class="nothing">
        Say something to ${parameters.value.model || server.value?.model || "the model"}. What you
        write stays between this browser and your nodes.
      </p>`}
      ${all.map((one, index) => html`<${Message} key=${one.id ?? `m${index}`} one=${one} />`)}
    </div>
  `;
}

function Message({ one }) {
  const isAnswer = one.role === "assistant";
  // So many tokens are drawn once, when the last one has come.
  const isLong = one.state === "running" && one.tokens.length > MOST_DRAWN;
  const hasHeat = parameters.value.heat && one.tokens?.length > 0 && !isLong;
  return html`
    <article class=${`message ${one.role}`} aria-label=${isAnswer ? "Answer" : "You"}>
      ${one.reasoning &&
      html`<details class="reasoning" open=${!one.content}>
        <summary>Reasoning</summary>
        <div class="text">${one.reasoning}</div>
      </details>`}
      ${hasHeat
        ? html`<${TokenHeat} tokens=${one.tokens} isRunning=${one.state === "running"} />`
        : isAnswer
          ? html`<${Prose} text=${one.content} />`
          : html`<${Thumbnails} urls=${one.pictures} />
              <div class="text"><p>${one.content}</p></div>`}
      ${(one.calls ?? []).map(
        (call) => html`<pre class="call" tabindex="0">${call.name}(${call.text})</pre>`,
      )}
      ${one.state === "stopped" && html`<p class="quiet">Stopped.</p>`}
      ${one.state === "failed" && html`<p class="failure" role="alert">${one.why}</p>`}
      ${one.figures && one.state !== "running" && html`<${Figures} figures=${one.figures} />`}
    </article>
  `;
}

function Figures({ figures: { beganMs, firstMs, lastMs, n, usage, finish } }) {
  if (firstMs === null) return null;
  const written = usage?.completion_tokens ?? n;
  const kept = usage?.prompt_tokens_details?.cached_tokens;
  const facts = [
    `${written} tokens`,
    written > 1 && lastMs > firstMs && rate((written - 1) / ((lastMs - firstMs) / 1000)),
    `first after ${duration((firstMs - beganMs) / 1000)}`,
    usage && `prompt of ${usage.prompt_tokens}${kept ? `, ${kept} of them kept` : ""}`,
    finish === "length" && "cut off at its limit",
  ];
  return html`<p class="quiet figures">${facts.filter(Boolean).join(" · ")}</p>`;
}

function Composer() {
  const field = useRef(null);
  useEffect(() => field.current.focus({ preventScroll: true }), []);
  const send = (event) => {
    event?.preventDefault();
    const text = draft.value.trim();
    if (!(text || attached.value.length) || isRunning.value) return;
    const pictures = attached.value;
    draft.value = "";
    attached.value = [];
    say(text, pictures);
  };
  const press = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    else if (event.key === "Escape") stop();
  };
  const isOn = isRunning.value;
  const isEmpty = !draft.value.trim() && !attached.value.length;
  const hasQuestion = messages.value.some(({ role }) => role === "user");
  return html`
    <form class="composer" onSubmit=${send} ...${target}>
      <p class="quiet note" role="status">${isOn ? note.value || "waiting" : ""}</p>
      <${Attached} />
      <label class="unseen" for="say">Your message</label>
      <textarea
        id="say"
        ref=${field}
        rows="3"
        value=${draft.value}
        placeholder="Enter sends, Shift and Enter begin a new line, Escape stops; drop or paste pictures"
        onInput=${(event) => (draft.value = event.target.value)}
        onKeyDown=${press}
      ></textarea>
      <div class="row">
        ${isOn
          ? html`<button type="button" class="main" onClick=${stop}>Stop</button>`
          : html`<button type="submit" class="main" disabled=${isEmpty}>Send</button>`}
        <button type="button" disabled=${isOn || !hasQuestion} onClick=${retry}>Retry</button>
        <button type="button" disabled=${!messages.value.length} onClick=${clear}>New chat</button>
        <${Choose} />
        <${Files} />
      </div>
    </form>
  `;
}

function Files() {
  const [why, setWhy] = useState("");
  const chooser = useRef(null);
  const name = kept.value.find(({ id }) => id === current.value)?.name ?? "";
  const load = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    setWhy("");
    await open(file).catch((error) => setWhy(error.message));
  };
  return html`
    <button
      type="button"
      disabled=${!messages.value.length}
      onClick=${() => save(messages.value, name)}
    >
      Save…
    </button>
    <button type="button" onClick=${() => chooser.current.click()}>Open…</button>
    <input type="file" class="gone" hidden accept=".json" ref=${chooser} onChange=${load} />
    ${why && html`<span class="failure" role="alert">${why}</span>`}
  `;
}

function Parameters() {
  const given = parameters.value;
  const change = (name, value) => (parameters.value = { ...parameters.value, [name]: value });
  const { state, models } = listed.value;
  return html`
    <details
      class="card parameters"
      onToggle=${(event) => event.target.open && state === "never" && listModels()}
    >
      <summary>Model and parameters</summary>
      <div class="row fields">
        <label>
          Model
          <select value=${given.model} onChange=${(event) => change("model", event.target.value)}>
            <option value="">${server.value?.model ?? "the default one"}</option>
            ${choices(models, given.model).map(
              (name) => html`<option value=${name}>${name}</option>`,
            )}
          </select>
        </label>
        ${FIELDS.map(
          ([name, label, bounds]) => html`
            <label key=${name}>
              ${label}
              <input
                type="number"
                ...${bounds}
                value=${given[name] ?? ""}
                placeholder="as usual"
                onInput=${(event) => change(name, event.target.value)}
              />
            </label>
          `,
        )}
        <label class="wide">
          System prompt
          <textarea
            rows="2"
            value=${given.system}
            onInput=${(event) => change("system", event.target.value)}
          ></textarea>
        </label>
        <label class="check">
          <input
            type="checkbox"
            checked=${given.heat}
            onChange=${(event) => change("heat", event.target.checked)}
          />
          ${" "}Show how sure the model is of each token
        </label>
      </div>
    </details>
  `;
}

/** The names that may be asked for; the chosen one stays, whatever is listed. */
function choices(models, chosen) {
  const names = models.filter(({ is_served }) => is_served).map(({ name }) => name);
  return chosen && !names.includes(chosen) ? [chosen, ...names] : names;
}
