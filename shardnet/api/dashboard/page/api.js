// Requests to the server that this page came from, with the key if there is one.
import { signal } from "./html.js";

// The page is one folder below the server's root, wherever a proxy has that.
const root = new URL("..", document.baseURI);
const STORED = "shardnet.key";

export const urlOf = (path) => new URL(path, root).href;

export const key = signal(sessionStorage.getItem(STORED) ?? localStorage.getItem(STORED) ?? "");
export const isKeyWanted = signal(false);
/** How often a key was given: the same one again counts. */
export const timesGiven = signal(0);

/** Take a key; it is kept until the window closes, or in this browser. */
export function takeKey(text, isKept) {
  for (const storage of [sessionStorage, localStorage]) storage.removeItem(STORED);
  if (text) (isKept ? localStorage : sessionStorage).setItem(STORED, text);
  key.value = text;
  isKeyWanted.value = false;
  timesGiven.value += 1;
}

/** What the server answered instead of what was asked for. */
export class ApiError extends Error {
  constructor(status, message, kind = "") {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

/** Send a request; return its response. Throws ApiError, TypeError where nothing answers. */
export async function ask(path, { method, body, signal: aborted } = {}) {
  const used = key.value;
  const headers = {};
  if (used) headers.authorization = `Bearer ${used}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(urlOf(path), {
    method: method ?? (body === undefined ? "GET" : "POST"),
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal: aborted,
    cache: "no-store",
    credentials: "omit",
  });
  if (response.ok) return response;
  if (response.status === 401 && used === key.value) isKeyWanted.value = true;
  throw await errorOf(response);
}

/** Send a request; return the JSON that is answered. */
export async function askJson(path, how) {
  return (await ask(path, how)).json();
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    const message = typeof error === "string" ? error : error.message;
    return new ApiError(response.status, message, error.type);
  } catch {
    return new ApiError(response.status, `the server answered ${response.status}`);
  }
}

/** Yield the events of a stream, {name, data}, and its comments, {comment}. */
export async function* eventsOf(response) {
  let text = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) yield eventOf(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  const event = { name: "message", data: "", comment: "" };
  const data = [];
  for (const line of block.split("\n")) {
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (field === "data") data.push(value);
    else if (field === "event") event.name = value;
    else if (field === "") event.comment = value;
  }
  event.data = data.join("\n");
  return event;
}

/** Say what went wrong in words for people. */
export function explain(error) {
  if (error instanceof ApiError) return error.message;
  if (error instanceof TypeError) return "the server does not answer";
  return String(error?.message ?? error);
}
