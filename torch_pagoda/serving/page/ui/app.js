// The page's beginning, its keys and its buttons.

import { ask, isAnswering, isStored, stop } from "./answers.js";
import { request } from "./api.js";
import { $, announce, copy, h } from "./dom.js";
import { openSettings } from "./settings.js";
import { showSidebar } from "./sidebar.js";
import { conversations, drop, load, save, saveAll, state } from "./state.js";
import * as store from "./store.js";
import { create, follow, newMode, open, showBanner, showComposer, showModel, showState, viewOf } from "./view.js";

const composer = $("message");

function grow() {
  composer.style.height = "auto";
  composer.style.height = `${Math.min(composer.scrollHeight, innerHeight * 0.4)}px`;
}

function submit() {
  const text = composer.value.trim();
  if (isAnswering() || $("send").disabled || !text) return;
  composer.value = "";
  grow();
  ask(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isAnswering()) stop();
  else submit();
});

composer.addEventListener("input", () => {
  grow();
  showComposer();
});

composer.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !composer.value && !isAnswering()) {
    const last = state.current.messages.findLast(({ role }) => role === "user");
    if (!last) return;
    event.preventDefault();
    viewOf(last).edit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (isAnswering()) stop();
  else if (!$("shade").hidden) showSidebar(false);
});

$("messages").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  // Without the last line break, at which a terminal would run what is pasted.
  if (button) copy(button.closest(".code").querySelector("code").textContent.replace(/\n$/, ""), button);
});

for (const id of ["new-chat", "header-new"]) {
  $(id).addEventListener("click", () => create(id === "new-chat" ? "chat" : newMode()));
}
$("new-notebook").addEventListener("click", () => create("notebook"));
$("show-sidebar").addEventListener("click", () => {
  showSidebar(true);
  $("hide-sidebar").focus();
});
$("hide-sidebar").addEventListener("click", () => {
  showSidebar(false);
  $("show-sidebar").focus();
});
$("shade").addEventListener("click", () => showSidebar(false));

function download(name, list) {
  const url = URL.createObjectURL(new Blob([store.exported(list)], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function importFile(file) {
  try {
    const list = store.conversationsOf(JSON.parse(await file.text()));
    for (const conversation of list) {
      await store.put(conversation);
      conversations.set(conversation.id, conversation);
    }
    announce(`${list.length} conversations imported`);
    showBanner("");
    if (list.length) open(list.at(-1));
  } catch (error) {
    showBanner(`The file was not imported: ${error.message}`, "Close", () => showBanner(""));
  }
}

$("export").addEventListener("click", () => download("pagoda-conversations.json", [...conversations.values()]));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", ({ target }) => {
  if (target.files[0]) importFile(target.files[0]);
  target.value = "";
});

$("open-settings").addEventListener("click", () =>
  openSettings({
    conversation: state.current,
    model: state.model,
    save: () => isStored() && save(state.current, true),
    exportThis: () => download("pagoda-conversation.json", [state.current]),
    removeAll: async () => {
      for (const id of [...conversations.keys()]) await drop(id);
      create();
    },
  }),
);

addEventListener("hashchange", () => {
  const conversation = conversations.get(location.hash.slice(1));
  if (conversation && conversation !== state.current) open(conversation);
});
addEventListener("pagehide", saveAll);

$("model").addEventListener("change", ({ target }) => {
  state.model = state.models[target.selectedIndex];
  showModel();
});

async function loadModels() {
  showBanner("");
  try {
    const { data } = await (await request("v1/models")).json();
    if (!data?.length) throw new Error("The server names no model.");
    state.models = data;
    state.model = data[0];
  } catch (error) {
    showBanner(error.message, "Try again", loadModels);
    return;
  }
  $("model").replaceChildren(...state.models.map(({ id }) => h("option", {}, id)));
  $("model").disabled = state.models.length < 2;
  showModel();
  const untouched = !isStored() && !composer.value && !state.current.text;
  if (untouched && state.current.mode !== newMode()) create();
}

async function start() {
  state.unsaved = () => showBanner("This browser does not keep conversations: they are lost when the page is closed.");
  await load();
  const asked = conversations.get(location.hash.slice(1));
  if (asked) open(asked);
  else create();
  showState();
  store.onChange(follow);
  await loadModels();
}

start();
