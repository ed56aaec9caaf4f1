// Pictures of the next message: chosen, dropped or pasted, shown small, taken away again.
import { html, signal, useRef } from "./html.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_BYTES = 18 << 20;

/** Those of the next message, as data: URLs. */
export const attached = signal([]);
const why = signal("");

/** Take the pictures among some files; say which are none. */
export async function attach(files) {
  why.value = "";
  for (const file of files) {
    if (!KINDS.includes(file.type)) why.value = `${file.name} is no PNG, JPEG, WebP or GIF`;
    else if (file.size > MOST_BYTES) why.value = `${file.name} is larger than 18 MiB`;
    else attached.value = [...attached.value, await dataUrl(file)];
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** What a form takes that pictures are dropped on and pasted into. */
export const target = {
  onDragOver: (event) => {
    if ([...event.dataTransfer.types].includes("Files")) event.preventDefault();
  },
  onDrop: (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  },
  onPaste: (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  },
};

export function Thumbnails({ urls, onRemove }) {
  if (!urls?.length) return null;
  return html`
    <ul class="thumbnails" aria-label="Pictures">
      ${urls.map(
        (url, index) => html`<li key=${index}>
          <img src=${url} alt=${`Picture ${index + 1}`} />
          ${onRemove &&
          html`<button
            type="button"
            aria-label=${`Remove picture ${index + 1}`}
            onClick=${() => onRemove(index)}
          >
            ×
          </button>`}
        </li>`,
      )}
    </ul>
  `;
}

/** The pictures of the next message, and what chooses some. */
export function Attached() {
  const remove = (index) => (attached.value = attached.value.filter((_, place) => place !== index));
  return html`
    <${Thumbnails} urls=${attached.value} onRemove=${remove} />
    ${why.value && html`<p class="failure" role="alert">${why.value}</p>`}
  `;
}

export function Choose() {
  const chooser = useRef(null);
  const take = (event) => {
    attach([...event.target.files]);
    event.target.value = "";
  };
  return html`
    <button type="button" onClick=${() => chooser.current.click()}>Picture…</button>
    <input
      type="file"
      hidden
      multiple
      accept=${KINDS.join(",")}
      aria-label="Choose pictures"
      ref=${chooser}
      onChange=${take}
    />
  `;
}
