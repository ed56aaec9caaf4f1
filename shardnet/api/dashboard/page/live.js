// What the server tells all the time: the state of the cluster, and since when nothing came.
import { ApiError, ask, askJson, eventsOf, explain, key, timesGiven } from "./api.js";
import { batch, computed, signal } from "./html.js";

export const server = signal(null);
export const nodes = signal([]);
export const ring = signal(null);
export const requests = signal([]);
export const usage = signal([]);
export const rates = signal(null);
export const jobs = signal([]);
/** The last trips round the ring, and when they were taken by the head's and by this clock. */
export const steps = signal({ ring: null, nowMs: 0, takenMs: 0, steps: [] });
/** Tokens a second of the last minutes, [{atMs, value}]. */
export const history = signal([]);
/** "connecting", "live", "lost", or "locked" without a key; with the reason and the moment. */
export const connection = signal({ state: "connecting", why: "", sinceMs: Date.now() });
/** The time, twice a second. */
export const now = signal(Date.now());

const HISTORY_MS = 120_000;
const STRIP_MS = 60_000;
const MOST_STEPS = 4096;
const SILENCE_MS = 20_000;
const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 5_000;
const UNSEEN_MS = 10_000;

/** Whether somebody may see the page now. */
const isSeen = signal(!document.hidden);
document.addEventListener("visibilitychange", () => (isSeen.value = !document.hidden));

const plain = { server, nodes, ring, requests, usage, jobs };

/** Whether what is shown is as it is now. */
export const isLive = computed(
  () => connection.value.state === "live" && server.value?.answers !== false,
);

/** The name of a node by its id. */
export const nameOf = (id) => nodes.value.find(({ node }) => node === id)?.name ?? id.slice(0, 8);

/** Take one event. */
export function take(name, data) {
  if (name in plain) plain[name].value = data;
  else if (name === "rates") takeRates(data);
  else if (name === "steps") takeSteps(data);
}

function takeRates(data) {
  rates.value = data;
  const atMs = Date.now();
  const kept = history.value.filter((one) => one.atMs > atMs - HISTORY_MS);
  history.value = [...kept, { atMs, value: data.tokens_per_s }];
}

function takeSteps(data) {
  const known = steps.value;
  const isSame = known.ring === data.ring;
  const last = isSame ? (known.steps.at(-1)?.step ?? -1) : -1;
  const all = [...(isSame ? known.steps : []), ...data.steps.filter(({ step }) => step > last)];
  steps.value = {
    ring: data.ring,
    nowMs: data.now_ms,
    takenMs: Date.now(),
    steps: all.filter(({ sent_ms }) => sent_ms > data.now_ms - STRIP_MS).slice(-MOST_STEPS),
  };
}

/** Read the events for as long as the page lives, whatever becomes of the server. */
export async function follow() {
  setInterval(() => (now.value = Date.now()), 500);
  for (let waitMs = FIRST_WAIT_MS; ; waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS)) {
    const given = timesGiven.value;
    try {
      await readEvents(() => (waitMs = FIRST_WAIT_MS));
      lose("lost", "the server ended the connection");
    } catch (error) {
      if (error.status === 401 && error instanceof ApiError) {
        lose("locked", "it asks for a key");
        await until(timesGiven, (times) => times !== given);
        continue;
      }
      if (error.name !== "AbortError") lose("lost", explain(error));
      else if (isSeen.value && timesGiven.value === given) lose("lost", "it said nothing for a while");
    }
    if (isSeen.value) await waited(waitMs);
    else await until(isSeen, (isIt) => isIt);
  }
}

function lose(state, why) {
  const was = connection.value;
  connection.value = { state, why, sinceMs: was.state === state ? was.sinceMs : Date.now() };
}

async function readEvents(onFirst) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  const usedKey = key.value;
  const stopKey = key.subscribe((value) => value === usedKey || silence.abort());
  // A browser has six connections to a server: pages that nobody sees leave theirs to others.
  let leaving;
  const stopSeen = isSeen.subscribe((isIt) => {
    clearTimeout(leaving);
    if (!isIt) leaving = setTimeout(() => silence.abort(), UNSEEN_MS);
  });
  try {
    const response = await ask("dashboard/api/events", { signal: silence.signal });
    for await (const { name, data } of eventsOf(response)) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      if (!data) continue;
      batch(() => {
        if (connection.value.state !== "live") {
          connection.value = { state: "live", why: "", sinceMs: Date.now() };
          onFirst();
        }
        take(name, JSON.parse(data));
      });
    }
  } finally {
    clearTimeout(timer);
    clearTimeout(leaving);
    stopKey();
    stopSeen();
  }
}

const waited = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Wait until a signal has a value. */
function until(source, isRight) {
  return new Promise((resolve) => {
    const stop = source.subscribe((value) => {
      if (!isRight(value)) return;
      queueMicrotask(() => stop());
      resolve();
    });
  });
}

/** Start something on the server; return the job or whatever it answers. */
export const start = (path, body) => askJson(`dashboard/api/${path}`, { method: "POST", body });
