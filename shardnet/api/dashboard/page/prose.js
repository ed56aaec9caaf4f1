// A model's text as Markdown. Only these elements come of it: markup of its own stays text.
import { html } from "./html.js";
import { Copied } from "./parts.js";
import { Lexer } from "./vendor/marked.js";

const LINKS = /^(https?:|mailto:)/i;
/** What is nested deeper, as a model that repeats itself writes it, is shown as it is. */
const DEEPEST = 50;

export function Prose({ text }) {
  return html`<div class="text">${blocks(read(text), 0)}</div>`;
}

function read(text) {
  try {
    return Lexer.lex(text, { gfm: true, breaks: true });
  } catch {
    return [{ raw: text }]; // nested deeper than the stack of calls
  }
}

const blocks = (tokens, depth) => tokens.map((token) => block(token, depth));

function block(token, depth) {
  switch (depth < DEEPEST && token.type) {
    case "space":
      return null;
    case "code": {
      const language = (token.lang ?? "").trim().slice(0, 40);
      return html`<${Copied} text=${token.text} name=${language ? `Code in ${language}` : "Code"} />`;
    }
    case "heading":
      return html`<p class="heading">${inline(token.tokens)}</p>`;
    case "blockquote":
      return html`<blockquote>${blocks(token.tokens, depth + 1)}</blockquote>`;
    case "list": {
      const items = token.items.map(
        (item) => html`<li>
          ${item.task && (item.checked ? "☑ " : "☐ ")}${blocks(item.tokens, depth + 1)}
        </li>`,
      );
      return token.ordered
        ? html`<ol start=${token.start || 1}>${items}</ol>`
        : html`<ul>${items}</ul>`;
    }
    case "table":
      return html`<div class="wide-table">
        <table>
          <thead><tr>${token.header.map((cell) => html`<th>${inline(cell.tokens)}</th>`)}</tr></thead>
          <tbody>
            ${token.rows.map(
              (row) => html`<tr>${row.map((cell) => html`<td>${inline(cell.tokens)}</td>`)}</tr>`,
            )}
          </tbody>
        </table>
      </div>`;
    case "hr":
      return html`<hr />`;
    case "paragraph":
      return html`<p>${inline(token.tokens)}</p>`;
    case "text":
      return html`<span>${token.tokens ? inline(token.tokens) : token.text}</span>`;
    default:
      return html`<p>${token.raw.trim()}</p>`;
  }
}

const inline = (tokens) => tokens.map(part);

function part(token) {
  switch (token.type) {
    case "strong":
      return html`<strong>${inline(token.tokens)}</strong>`;
    case "em":
      return html`<em>${inline(token.tokens)}</em>`;
    case "del":
      return html`<del>${inline(token.tokens)}</del>`;
    case "codespan":
      return html`<code>${token.text}</code>`;
    case "br":
      return html`<br />`;
    case "link":
      return LINKS.test(token.href)
        ? html`<a href=${token.href} target="_blank" rel="noopener noreferrer"
            >${inline(token.tokens)}</a
          >`
        : token.raw;
    case "escape":
    case "text":
      return token.tokens ? inline(token.tokens) : token.text;
    default:
      return token.raw;
  }
}
