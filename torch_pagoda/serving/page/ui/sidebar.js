// The list of conversations: open, rename, delete.

import { $, h, icon, iconButton } from "./dom.js";
import { isStreaming } from "./state.js";

export const titleOf = ({ title, messages, text, mode }) => {
  const source = title || (mode === "notebook" ? text : messages.find(({ role }) => role === "user")?.content) || "";
  const line = source.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 60)}…` : line || (mode === "notebook" ? "New notebook" : "New chat");
};

function entry(conversation, current, { open, rename, remove }) {
  const name = titleOf(conversation);
  const item = h("li", { class: conversation.id === current ? "current" : "" });
  const edit = () => {
    const input = h("input", { "aria-label": "Title", value: conversation.title || name, maxlength: 200 });
    let ended = false;
    const end = (keeps) => {
      if (ended) return;
      ended = true;
      input.remove();
      rename(conversation, keeps ? input.value.trim() : conversation.title);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      end(false);
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.select();
  };
  item.append(
    h(
      "a",
      {
        href: `#${conversation.id}`,
        "aria-current": conversation.id === current ? "page" : null,
        title: name,
        onclick: (event) => {
          event.preventDefault();
          open(conversation.id);
        },
      },
      icon(conversation.mode),
      h("span", {}, name),
      isStreaming(conversation) ? h("span", { class: "dot", role: "img", "aria-label": "is being answered" }) : null,
    ),
    iconButton("edit", `Rename ${name}`, edit),
    iconButton("trash", `Delete ${name}`, () => remove(conversation)),
  );
  return item;
}

export function showList(conversations, current, actions) {
  // A title that is being typed stays.
  if ($("conversations").querySelector("input")) return;
  const sorted = [...conversations].sort((a, b) => b.updated - a.updated);
  $("conversations").replaceChildren(...sorted.map((conversation) => entry(conversation, current, actions)));
}

// Else the list lies over the page.
export const wide = matchMedia("(min-width: 800px)");

export function showSidebar(open) {
  document.body.classList.toggle("with-sidebar", open);
  $("show-sidebar").setAttribute("aria-expanded", open);
  $("shade").hidden = !open || wide.matches;
  $("main").inert = !$("shade").hidden;
}
