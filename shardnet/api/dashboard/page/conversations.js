// The conversations that this browser keeps: listed, opened, renamed, saved to files, deleted.
import { clear, current, isRunning, kept, remove, rename, resume, save } from "./conversation.js";
import { html } from "./html.js";

export function Conversations() {
  if (!kept.value.length) return null;
  const askName = ({ id, name }) => {
    const wanted = prompt("A name for this conversation", name)?.trim();
    if (wanted) rename(id, wanted);
  };
  return html`
    <details class="card conversations">
      <summary>Conversations (${kept.value.length})</summary>
      <ul>
        ${kept.value.map(
          (one) => html`<li key=${one.id} class="row">
            <button
              type="button"
              class="plain"
              aria-current=${one.id === current.value ? "true" : undefined}
              disabled=${isRunning.value}
              onClick=${() => resume(one.id)}
            >
              ${one.name}
            </button>
            <button type="button" aria-label=${`Rename ${one.name}`} onClick=${() => askName(one)}>
              Rename
            </button>
            <button
              type="button"
              aria-label=${`Save ${one.name}`}
              onClick=${() => save(one.messages, one.name)}
            >
              Save…
            </button>
            <button
              type="button"
              aria-label=${`Delete ${one.name}`}
              disabled=${isRunning.value && one.id === current.value}
              onClick=${() => (one.id === current.value && clear(), remove(one.id))}
            >
              Delete
            </button>
          </li>`,
        )}
      </ul>
    </details>
  `;
}
