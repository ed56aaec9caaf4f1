// Small parts that several views show.
import { percent } from "./format.js";
import { html, useRef, useState } from "./html.js";

/** A bar with its meaning in words; `share` is of 1, null where it is not known. */
export function Bar({ share, label, kind = "" }) {
  return html`<progress
    class=${kind}
    aria-label=${label}
    max="1"
    value=${share == null ? undefined : Math.min(1, Math.max(0, share))}
  >
    ${share == null ? "" : percent(share)}
  </progress>`;
}

/** A button that says that it works, and below it why it failed. */
export function Action({ label, act, kind = "", name, disabled = false }) {
  const [state, setState] = useState({ works: false, why: "" });
  const press = async () => {
    setState({ works: true, why: "" });
    try {
      await act();
      setState({ works: false, why: "" });
    } catch (error) {
      setState({ works: false, why: String(error.message ?? error) });
    }
  };
  return html`
    <button
      type="button"
      class=${kind}
      aria-label=${name}
      aria-busy=${state.works}
      disabled=${disabled || state.works}
      onClick=${press}
    >
      ${label}
    </button>
    ${state.why && html`<span class="failure" role="alert">${state.why}</span>`}
  `;
}

/** A text to be copied. */
export function Copied({ text, name }) {
  const block = useRef(null);
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Without HTTPS a browser has no clipboard for pages: the old way is left.
      getSelection().selectAllChildren(block.current);
      if (!document.execCommand("copy")) return;
    }
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  return html`
    <div class="copied">
      <pre ref=${block} tabindex="0" aria-label=${name}>${text}</pre>
      <button type="button" aria-label=${`Copy: ${name}`} onClick=${copy}>
        ${isCopied ? "Copied" : "Copy"}
      </button>
    </div>
  `;
}

/** What stands where there is nothing to show. */
export const Nothing = ({ children }) => html`<p class="nothing">${children}</p>`;
