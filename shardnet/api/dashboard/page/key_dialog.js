// Asks for the API key when the server wants one.
import { isKeyWanted, key, takeKey } from "./api.js";
import { html, useLayoutEffect, useRef } from "./html.js";

export function KeyDialog() {
  const dialog = useRef(null);
  const isOurs = useRef(false);
  const isOpen = isKeyWanted.value;
  useLayoutEffect(() => {
    if (isOpen && !dialog.current.open) dialog.current.showModal();
    if (!isOpen && dialog.current.open) {
      isOurs.current = true;
      dialog.current.close();
    }
  }, [isOpen]);
  // The event of a closing comes late: a key that was refused may be asked for again by then.
  const closed = () => {
    if (!isOurs.current) isKeyWanted.value = false;
    isOurs.current = false;
  };
  const submit = (event) => {
    event.preventDefault();
    const fields = event.target.elements;
    takeKey(fields.key.value.trim(), fields.keep.checked);
    fields.key.value = "";
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="key-title" onClose=${closed}>
      <form onSubmit=${submit}>
        <h2 id="key-title">API key</h2>
        <p>
          ${key.value
            ? "This server does not know the key that was given."
            : "This server asks for one of its keys: its owner chose them with --api-key."}
        </p>
        <label>
          Key
          <input name="key" type="password" autocomplete="off" spellcheck=${false} autofocus />
        </label>
        <label class="check"><input name="keep" type="checkbox" /> Keep it in this browser</label>
        <div class="row">
          <button type="submit" class="main">Use the key</button>
          <button type="button" onClick=${() => dialog.current.close()}>Not now</button>
        </div>
      </form>
    </dialog>
  `;
}
