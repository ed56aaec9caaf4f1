// An answer token by token: the less sure the model was, the warmer. Arrows go from one to the next.
import { percent } from "./format.js";
import { html, useState } from "./html.js";

const STEPS = [0.9, 0.7, 0.5, 0.3, 0.1];

/** Text of each token; a character of several tokens comes with its last one. */
function texts(tokens) {
  const decoder = new TextDecoder();
  return tokens.map(({ bytes, token }) =>
    bytes ? decoder.decode(Uint8Array.from(bytes), { stream: true }) : token,
  );
}

export function TokenHeat({ tokens, isRunning }) {
  const [chosen, setChosen] = useState(null);
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) {
      if (event.key === "Escape") setChosen(null);
      return;
    }
    event.preventDefault();
    setChosen(Math.min(tokens.length - 1, Math.max(0, (chosen ?? -1) + by)));
  };
  const pick = (event) => {
    const number = event.target.dataset?.token;
    if (number !== undefined) setChosen(Number(number));
  };
  const token = tokens[chosen];
  const shown = texts(tokens);
  return html`
    <div
      class="text heat"
      tabindex="0"
      role="group"
      aria-label="Answer by tokens: left and right choose one"
      onKeyDown=${move}
      onClick=${pick}
      onMouseOver=${isRunning ? undefined : pick}
    >
      ${tokens.map(
        (one, index) => html`<span
          key=${index}
          data-token=${index}
          class=${`h${warmth(one.logprob)}${index === chosen ? " chosen" : ""}`}
          >${shown[index]}</span
        >`,
      )}
    </div>
    <div class="likely" aria-live="polite">
      ${token
        ? html`
            <b>${visible(token.token)}</b> ${percent(Math.exp(token.logprob))}
            ${token.top_logprobs
              .filter((one) => one.token !== token.token || one.logprob !== token.logprob)
              .map(
                (one) => html`<span class="other">
                  ${visible(one.token)} ${percent(Math.exp(one.logprob))}
                </span>`,
              )}
          `
        : html`<span class="quiet">Point at a token to see how sure the model was of it.</span>`}
    </div>
  `;
}

const warmth = (logprob) => STEPS.filter((share) => Math.exp(logprob) < share).length;

const visible = (token) => JSON.stringify(token).slice(1, -1) || "(nothing)";
