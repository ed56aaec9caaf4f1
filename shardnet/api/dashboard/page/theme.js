// Light or dark: as the system, or as chosen here.
import { effect, signal } from "./html.js";

export const THEMES = { auto: "as the system", light: "light", dark: "dark" };
const STORED = "shardnet.theme";

export const theme = signal(localStorage.getItem(STORED) ?? "auto");
/** Whether the system is dark. */
export const isSystemDark = signal(false);

const system = matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", () => (isSystemDark.value = system.matches));
isSystemDark.value = system.matches;

effect(() => {
  const name = theme.value in THEMES ? theme.value : "auto";
  document.documentElement.dataset.theme = name;
  localStorage.setItem(STORED, name);
});
