// Elements, icons, announcements, the clipboard.

export const $ = (id) => document.getElementById(id);

// An element; `on…` properties are listeners, the others attributes (true: empty, false or null: none).
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

export const button = (label, onclick, kind = "") =>
  h("button", { type: "button", class: `button ${kind}`, onclick }, label);

export const iconButton = (name, label, onclick, more = {}) =>
  h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...more }, icon(name));

// Has a screen reader say a text when it is done with what it reads.
export function announce(text) {
  const live = $("live");
  live.append(h("p", {}, text.slice(0, 1000)));
  while (live.childElementCount > 20) live.firstElementChild.remove();
}

// Outside secure contexts (plain http on another host) there is no navigator.clipboard.
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "sr", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("The browser did not copy.");
}

export async function copy(text, button) {
  const back = [...button.childNodes];
  const focus = document.activeElement;
  try {
    await toClipboard(text);
    announce("Copied");
    button.replaceChildren(icon("check"), ...(button.classList.contains("icon-button") ? [] : ["Copied"]));
  } catch {
    announce("Copying failed");
    button.replaceChildren(icon("warning"));
  }
  focus?.focus();
  setTimeout(() => button.replaceChildren(...back), 1500);
}

export const identifier = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

// The icons and tooltips of the page's fixed buttons.
for (const element of document.querySelectorAll("[data-icon]")) {
  element.prepend(icon(element.dataset.icon));
  element.title = element.ariaLabel ?? "";
}
