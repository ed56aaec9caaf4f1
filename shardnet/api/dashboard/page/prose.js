// A model's text with its code blocks set apart. All of it is text: no markup of it becomes HTML.
import { html } from "./html.js";
import { Copied } from "./parts.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;

export function Prose({ text }) {
  return html`
    <div class="text">
      ${parts(text).map(({ code, language, lines }) =>
        code
          ? html`<${Copied} text=${lines.join("\n")} name=${language ? `Code in ${language}` : "Code"} />`
          : html`<p>${lines.join("\n").replace(/^\n+|\n+$/g, "")}</p>`,
      )}
    </div>
  `;
}

function parts(text) {
  const all = [];
  let open = null;
  for (const line of text.split("\n")) {
    const found = FENCE.exec(line);
    if (open && found && found[1].startsWith(open.fence) && !found[2].trim()) open = null;
    else if (!open && found) {
      open = { code: true, fence: found[1], language: found[2].trim().slice(0, 40), lines: [] };
      all.push(open);
    } else if (open) open.lines.push(line);
    else if (all.at(-1)?.code === false) all.at(-1).lines.push(line);
    else all.push({ code: false, lines: [line] });
  }
  return all.filter(({ code, lines }) => code || lines.some((line) => line.trim()));
}
