// What every view is written with. Text stays text: nothing is parsed as HTML.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
export { batch, computed, effect, signal } from "./vendor/signals.js";

export const html = htm.bind(h);
