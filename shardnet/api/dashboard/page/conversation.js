// A conversation with the model: its messages, how it is continued, stopped, kept in a file.
import { ApiError, ask, eventsOf, explain } from "./api.js";
import { effect, signal } from "./html.js";

const STORED = "shardnet.conversations";
const MOST_KEPT = 100;
const MOST_NAME = 60;
const STORED_PARAMETERS = "shardnet.parameters";
const MOST_BYTES = 64 << 20;
const N_LIKELY = 5;

let running = null;

/** What may be set, with its bounds. A field that is empty is left to the server. */
export const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 5, step: 0.05 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, max: 2, step: 0.01 }],
  ["max_completion_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
];

/** The messages: {role, content}, of a question pictures and, of an answer, reasoning, tokens, calls, state, why, figures. */
export const messages = signal([]);
/** The conversations that are kept, the last one that was used first: {id, name, messages}. */
export const kept = signal(stored(STORED, []).filter(isConversation));
/** The id of the one that is shown. */
export const current = signal(newId());
export const parameters = signal({ model: "", system: "", heat: false, ...stored(STORED_PARAMETERS, {}) });
/** What the answer that is being made waits for, "" for none. */
export const note = signal("");
export const isRunning = signal(false);

function stored(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function isMessage(one) {
  return ["user", "assistant", "system"].includes(one?.role) && typeof one.content === "string";
}

function isConversation(one) {
  const isNamed = typeof one?.id === "string" && typeof one.name === "string";
  return isNamed && Array.isArray(one.messages) && one.messages.every(isMessage);
}

function newId() {
  return `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}

if (kept.value.length) resume(kept.value[0].id);
effect(() => {
  if (!isRunning.value) keepCurrent(messages.value);
});
effect(() => {
  // The oldest make room where a browser has too little.
  for (let some = kept.value; !keep(STORED, some) && some.length > 1; ) some = some.slice(0, -1);
});

/** Keep the conversation that is shown, in front of the others. */
function keepCurrent(shown) {
  if (!shown.length) return;
  const said = shown.map(({ role, content }) => ({ role, content }));
  const id = current.peek();
  const known = kept.peek().find((one) => one.id === id);
  if (JSON.stringify(known?.messages) === JSON.stringify(said)) return;
  const name = known?.name ?? (said[0].content.trim() || "Picture").split("\n")[0].slice(0, MOST_NAME);
  const others = kept.peek().filter((one) => one.id !== id);
  kept.value = [{ id, name, messages: said }, ...others].slice(0, MOST_KEPT);
}

/** Show a conversation that is kept. */
export function resume(id) {
  stop();
  current.value = id;
  messages.value = kept.peek().find((one) => one.id === id)?.messages ?? [];
}

export function rename(id, name) {
  kept.value = kept.value.map((one) => (one.id === id ? { ...one, name } : one));
}

export function remove(id) {
  kept.value = kept.value.filter((one) => one.id !== id);
}

effect(() => void keep(STORED_PARAMETERS, parameters.value));

/** Store a value; say whether there was room. */
function keep(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // larger than a browser keeps: Save writes it to a file
  }
}

/** Say something, and have it answered. Pictures are data: URLs. */
export function say(content, pictures = []) {
  messages.value = [...messages.value, { role: "user", content, pictures }];
  return answer();
}

/** Have the last question answered anew. */
export function retry() {
  const last = messages.value.findLastIndex(({ role }) => role === "user");
  if (last < 0 || isRunning.value) return undefined;
  messages.value = messages.value.slice(0, last + 1);
  return answer();
}

export function stop() {
  running?.abort();
}

/** Begin a new conversation; the one that was shown is kept. */
export function clear() {
  keepCurrent(messages.value);
  stop();
  current.value = newId();
  messages.value = [];
}

async function answer() {
  stop();
  const mine = new AbortController();
  running = mine;
  isRunning.value = true;
  const made = newAnswer();
  const before = messages.value;
  keepCurrent(before);
  const show = () => {
    if (messages.value !== before && messages.value.at(-1)?.id !== made.id) return;
    messages.value = [...before, { ...made }];
  };
  // Tokens come faster than a screen is drawn.
  let isDue = false;
  const showSoon = () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => ((isDue = false), show()), 33);
  };
  show();
  try {
    await receive(before, made, mine.signal, showSoon);
    made.state = "done";
  } catch (error) {
    made.state = error.name === "AbortError" ? "stopped" : "failed";
    made.why = made.state === "failed" ? failure(error) : "";
  } finally {
    isDue = true;
    show();
    if (running === mine) {
      running = null;
      note.value = "";
      isRunning.value = false;
    }
  }
}

let lastId = 0;

function newAnswer() {
  lastId += 1;
  return {
    id: lastId,
    role: "assistant",
    content: "",
    reasoning: "",
    calls: [],
    tokens: [],
    pending: [],
    state: "running",
    why: "",
    figures: { beganMs: performance.now(), firstMs: null, lastMs: null, n: 0, usage: null, finish: null },
  };
}

function failure(error) {
  const isTooLong = error instanceof ApiError && error.kind === "exceed_context_size_error";
  return explain(error) + (isTooLong ? " Begin a new chat, or ask for a larger --context." : "");
}

async function receive(before, made, aborted, showSoon) {
  const response = await ask("v1/chat/completions", { body: bodyOf(before), signal: aborted });
  for await (const { data, comment } of eventsOf(response)) {
    if (comment) note.value = comment;
    if (!data) continue;
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message, chunk.error.type);
    takeChunk(made, chunk);
    if (made.figures.n) note.value = "";
    showSoon();
  }
  throw new Error("the connection ended before the answer did");
}

function bodyOf(before) {
  const { model, system, heat, ...given } = parameters.value;
  const body = { messages: [], stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model;
  if (system.trim()) body.messages.push({ role: "system", content: system });
  for (const one of before) body.messages.push({ role: one.role, content: contentOf(one) });
  if (heat) Object.assign(body, { logprobs: true, top_logprobs: N_LIKELY });
  for (const [name] of FIELDS) {
    const value = Number.parseFloat(given[name]);
    if (Number.isFinite(value)) body[name] = value;
  }
  return body;
}

function contentOf({ content, pictures }) {
  if (!pictures?.length) return content;
  const shown = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...shown, { type: "text", text: content }] : shown;
}

function takeChunk(made, chunk) {
  const { figures } = made;
  if (chunk.usage) figures.usage = chunk.usage;
  const [choice] = chunk.choices;
  if (!choice) return;
  const { delta } = choice;
  const tokens = choice.logprobs?.content ?? [];
  if (delta.content || delta.reasoning_content || delta.tool_calls || tokens.length) {
    figures.lastMs = performance.now();
    figures.firstMs ??= figures.lastMs;
    figures.n += tokens.length || 1;
  }
  made.content += delta.content ?? "";
  made.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) takeCall(made.calls, part);
  takeTokens(made, delta, tokens);
  figures.finish = choice.finish_reason ?? figures.finish;
}

/** Keep the tokens that are content: not those of reasoning and calls, nor the marks around them. */
function takeTokens(made, delta, tokens) {
  made.pending.push(...tokens);
  if (delta.content) {
    const isOwn = tokens.map(({ token }) => token).join("") === delta.content;
    made.tokens = [...made.tokens, ...(isOwn ? tokens : made.pending)];
  }
  if (delta.content || delta.reasoning_content || delta.tool_calls) made.pending = [];
}

function takeCall(calls, { index, function: { name, arguments: text } }) {
  calls[index] ??= { name: "", text: "" };
  calls[index].name += name ?? "";
  calls[index].text += text ?? "";
}

/** Save a conversation to a file that `shardnet chat` loads too. */
export function save(said, name) {
  const system = parameters.value.system.trim();
  const every = said.map(({ role, content, pictures }) => ({
    role,
    content: pictures?.length ? partsOf(content, pictures) : content,
  }));
  if (system) every.unshift({ role: "system", content: system });
  const text = JSON.stringify({ messages: every }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `${name.replaceAll(/[^\p{L}\p{N} ._-]/gu, "").trim() || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function partsOf(content, pictures) {
  const shown = pictures.map((url) => ({ type: "image", image: url.split(",", 2)[1] }));
  return [...shown, { type: "text", text: content }];
}

/** Return a message of a file as it is shown here: its pictures beside its text. */
function readMessage(one) {
  if (!Array.isArray(one?.content)) return one;
  const texts = one.content.filter((part) => part?.type === "text" && typeof part.text === "string");
  const shown = one.content.filter((part) => part?.type === "image" && typeof part.image === "string");
  return {
    role: one.role,
    content: texts.map(({ text }) => text).join("\n"),
    pictures: shown.map(({ image }) => `data:${kindOf(image)};base64,${image}`),
  };
}

/** Say what picture begins so, in base64. */
function kindOf(image) {
  if (image.startsWith("/9j/")) return "image/jpeg";
  if (image.startsWith("R0lG")) return "image/gif";
  return image.startsWith("UklG") ? "image/webp" : "image/png";
}

/** Take a conversation from such a file. Throws an Error with the reason. */
export async function open(file) {
  if (file.size > MOST_BYTES) throw new Error("the file is too large for a conversation");
  let read;
  try {
    read = JSON.parse(await file.text());
  } catch {
    throw new Error("the file holds no conversation: it is not JSON");
  }
  const said = Array.isArray(read?.messages) ? read.messages.map(readMessage) : [null];
  if (!said.every(isMessage)) {
    throw new Error("the file holds no conversation: no messages with role and content");
  }
  clear();
  const [first, ...rest] = said;
  const hasSystem = first?.role === "system";
  parameters.value = { ...parameters.value, system: hasSystem ? first.content : "" };
  messages.value = hasSystem ? rest : said;
}
