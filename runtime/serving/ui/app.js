// The page: what is open, what is asked, what is kept.

import { request } from "./api.js";
import { $, announce, copy, h, icon } from "./dom.js";
import { MessageView } from "./messages.js";
import { Notebook } from "./notebook.js";
import { defaultSettings, openSettings } from "./settings.js";
import { setSidebar, showList, titleOf } from "./sidebar.js";
import * as store from "./store.js";
import { Turn } from "./turn.js";

const SAVE_EVERY = 700; // ms, while text streams
const STALE = 10_000; // ms without a sign of the tab that streams

const conversations = new Map();
const turns = new Map(); // of conversations that this tab answers
const views = new Map(); // of the open conversation's messages
const saving = new Map();
let models = [{ id: "", has_chat_template: true }];
let model = models[0];
let current = null;
let pinned = true;

const scroller = $("scroller");
const composer = $("message");
const wide = matchMedia("(min-width: 800px)");

const notebook = new Notebook({ turns, save, model: () => model, changed: showState });

// ---- keeping

function save(conversation, now = false) {
  conversation.updated = Date.now();
  conversations.set(conversation.id, conversation);
  if (now) {
    clearTimeout(saving.get(conversation.id));
    write(conversation);
  } else if (!saving.has(conversation.id)) {
    saving.set(conversation.id, setTimeout(() => write(conversation), SAVE_EVERY));
  }
}

async function write(conversation) {
  saving.delete(conversation.id);
  // Removed meanwhile.
  if (!conversations.has(conversation.id)) return;
  conversation.owner = turns.has(conversation.id) ? store.tab : "";
  try {
    await store.put(conversation);
  } catch {
    showBanner("This browser does not keep conversations: they are lost when the page is closed.");
  }
}

// An answer that was streaming when its page was closed is one that was stopped.
function settle(conversation) {
  const message = conversation.mode === "notebook" ? conversation.run : conversation.messages.at(-1);
  if (message?.status !== "streaming" || turns.has(conversation.id)) return;
  const gone = conversation.owner === store.tab || Date.now() - conversation.updated > STALE;
  if (gone) message.status = "stopped";
}

// Another tab has changed a conversation or removed it.
async function follow(id) {
  if (turns.has(id)) return;
  const fresh = await store.get(id);
  if (!fresh) {
    conversations.delete(id);
    if (current.id === id) create(current.mode);
  } else {
    settle(fresh);
    conversations.set(id, fresh);
    if (current.id === id) {
      current = fresh;
      showMessages();
    }
  }
  showState();
}

// ---- opening

const actions = { edit, again, goOn, pick };

function create(mode = model.has_chat_template === false ? "notebook" : "chat") {
  open({ ...store.emptyConversation(mode), settings: defaultSettings() });
}

function open(conversation) {
  current = conversation;
  settle(current);
  views.clear();
  $("messages").replaceChildren();
  const hash = conversations.has(current.id) ? `#${current.id}` : "";
  history.replaceState(null, "", `${location.pathname}${location.search}${hash}`);
  const isNotebook = current.mode === "notebook";
  $("notebook").hidden = !isNotebook;
  scroller.hidden = $("dock").hidden = isNotebook;
  pinned = true;
  showMessages();
  showState();
  if (!wide.matches) setSidebar(false);
  if (isNotebook) notebook.focus();
  else composer.focus();
}

function showMessages() {
  if (current.mode === "notebook") {
    notebook.show(current);
    return;
  }
  const known = new Set(current.messages.map(({ id }) => id));
  for (const [id, view] of views) {
    if (known.has(id)) continue;
    view.element.remove();
    views.delete(id);
  }
  for (const message of current.messages) {
    const view = views.get(message.id);
    if (view) view.sync(message);
    else {
      const fresh = new MessageView(message, actions, model.max_model_len);
      views.set(message.id, fresh);
      $("messages").append(fresh.element);
    }
  }
  keepEnd();
}

function emptyPage() {
  const facts = [model.id, model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens of context` : ""];
  return h(
    "div",
    { class: "empty" },
    icon("logo"),
    h("p", { class: "big" }, "What would you like to ask?"),
    h("p", { class: "meta" }, facts.filter(Boolean).join(" · ")),
  );
}

// All that depends on what is open and what runs.
function showState() {
  const title = titleOf(current);
  $("title").textContent = title;
  document.title = conversations.has(current.id) ? `${title} – pagoda` : "pagoda";
  const actionsOfList = { open: (id) => open(conversations.get(id)), rename, remove };
  showList(conversations.values(), current.id, actionsOfList);
  $("messages").querySelector(".empty")?.remove();
  if (!current.messages.length) $("messages").append(emptyPage());
  const own = turns.has(current.id);
  const elsewhere = !own && current.messages.at(-1)?.status === "streaming";
  const send = $("send");
  const label = own ? "Stop" : "Send";
  if (send.title !== label) {
    send.title = label;
    send.setAttribute("aria-label", label);
    send.replaceChildren(icon(own ? "stop" : "send"));
  }
  send.disabled = elsewhere || (!own && !composer.value.trim());
  composer.placeholder = elsewhere ? "Another tab is being answered here" : "Ask something";
  const stats = current.messages.findLast(({ stats: known }) => known?.promptTokens != null)?.stats;
  $("context").hidden = !stats || !model.max_model_len;
  if (!$("context").hidden) {
    const used = stats.promptTokens + stats.tokens;
    $("context-meter").max = model.max_model_len;
    $("context-meter").high = model.max_model_len * 0.9;
    $("context-meter").value = used;
    $("context-text").textContent = `${used.toLocaleString("en")} of ${model.max_model_len.toLocaleString("en")} tokens`;
  }
}

function showBanner(text, label, action) {
  $("banner").hidden = !text;
  const button = action ? h("button", { type: "button", class: "button", onclick: action }, label) : "";
  $("banner").replaceChildren(h("p", {}, text), button);
}

let toastTimer = 0;

function toast(text, undo) {
  $("toast")?.remove();
  clearTimeout(toastTimer);
  const box = h("div", { id: "toast", role: "status" }, text);
  const end = () => box.remove();
  box.append(h("button", { type: "button", class: "link", onclick: () => (undo(), end()) }, "Undo"));
  document.body.append(box);
  toastTimer = setTimeout(end, 10_000);
}

// ---- asking

function ask(text) {
  current.messages.push(store.emptyMessage("user", text));
  answer();
}

function answer() {
  const message = store.emptyMessage("assistant");
  current.messages.push(message);
  run(message);
}

async function run(message, continues = false) {
  const conversation = current;
  let frame = 0;
  const view = () => (current === conversation ? views.get(message.id) : null);
  const turn = new Turn(conversation, model, (kind, delta) => {
    if (kind === "content") view()?.appendContent(delta);
    if (kind === "reasoning") view()?.appendReasoning(delta);
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      if (kind === "tools") view()?.refresh();
      if (turns.get(conversation.id) === turn) view()?.live(turn.stats);
    });
    save(conversation);
  });
  turns.set(conversation.id, turn);
  message.status = "streaming";
  save(conversation, true);
  location.hash || history.replaceState(null, "", `#${conversation.id}`);
  pinned = true;
  showMessages();
  showState();
  announce("Answering");
  await turn.chat(message, continues);
  turns.delete(conversation.id);
  cancelAnimationFrame(frame);
  save(conversation, true);
  await view()?.end();
  showState();
  announce({ done: "The answer is complete.", stopped: "Stopped.", error: "The answer failed." }[message.status]);
}

// Removes the messages behind one, which can be undone.
function cut(index) {
  const conversation = current;
  const removed = conversation.messages.splice(index + 1);
  if (!removed.length) return;
  toast(`${removed.length} later ${removed.length === 1 ? "message was" : "messages were"} removed.`, () => {
    if (turns.has(conversation.id)) turns.get(conversation.id).stop();
    conversation.messages.splice(index + 1, Infinity, ...removed);
    save(conversation, true);
    if (current === conversation) {
      $("messages").replaceChildren();
      views.clear();
      showMessages();
      showState();
    }
  });
}

function edit(message, text, sends) {
  message.content = text;
  if (message.role === "assistant") message.edited = true;
  save(current, true);
  if (!sends || turns.has(current.id)) return showState();
  cut(current.messages.indexOf(message));
  answer();
}

const PARTS = ["content", "reasoning", "reasoningSeconds", "toolCalls", "stats", "finish", "status", "edited", "error"];

const partsOf = (message) => Object.fromEntries(PARTS.map((part) => [part, message[part]]));

function again(message) {
  if (turns.has(current.id)) return;
  cut(current.messages.indexOf(message));
  if (message.content || message.toolCalls?.length) {
    message.versions ??= [];
    message.versions[message.version ?? 0] = partsOf(message);
    message.version = message.versions.length;
    message.versions.push({});
  }
  for (const part of PARTS) delete message[part];
  message.content = "";
  replaceView(message);
  run(message);
}

function pick(message, step) {
  message.versions[message.version] = partsOf(message);
  message.version += step;
  Object.assign(message, message.versions[message.version]);
  save(current, true);
  replaceView(message);
  showMessages();
}

// Its view is made anew, in its place.
function replaceView(message) {
  const fresh = new MessageView(message, actions, model.max_model_len);
  views.get(message.id).element.replaceWith(fresh.element);
  views.set(message.id, fresh);
}

function goOn(message) {
  if (turns.has(current.id)) return;
  cut(current.messages.indexOf(message));
  run(message, true);
}

function rename(conversation, title) {
  conversation.title = title;
  conversations.get(conversation.id).title = title;
  write(conversation);
  document.activeElement?.blur();
  showState();
  $("conversations").querySelector("input")?.remove();
  showState();
}

async function remove(conversation) {
  turns.get(conversation.id)?.stop();
  conversations.delete(conversation.id);
  await store.remove(conversation.id);
  if (current.id === conversation.id) create(current.mode);
  showState();
  toast("The conversation was deleted.", () => {
    save(conversation, true);
    open(conversation);
  });
}

// ---- files

function download(name, list) {
  const url = URL.createObjectURL(new Blob([store.exported(list)], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function importFile(file) {
  try {
    const list = store.conversationsOf(JSON.parse(await file.text()));
    for (const conversation of list) {
      conversations.set(conversation.id, conversation);
      await store.put(conversation);
    }
    announce(`${list.length} conversations imported`);
    showBanner("");
    if (list.length) open(list.at(-1));
  } catch (error) {
    showBanner(`The file was not imported: ${error.message}`, "Close", () => showBanner(""));
  }
}

// ---- the end of the messages

function keepEnd() {
  if (pinned) scroller.scrollTop = scroller.scrollHeight;
  $("to-end").hidden = pinned;
}

scroller.addEventListener("scroll", () => {
  pinned = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
  $("to-end").hidden = pinned;
}, { passive: true });
new ResizeObserver(keepEnd).observe($("messages"));
new ResizeObserver(keepEnd).observe(scroller);
$("to-end").addEventListener("click", () => {
  pinned = true;
  keepEnd();
});

// ---- input

function grow() {
  composer.style.height = "auto";
  composer.style.height = `${Math.min(composer.scrollHeight, innerHeight * 0.4)}px`;
}

function submit() {
  const text = composer.value.trim();
  const turn = turns.get(current.id);
  if (turn || $("send").disabled || !text) return;
  composer.value = "";
  grow();
  ask(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const turn = turns.get(current.id);
  if (turn) turn.stop();
  else submit();
});

composer.addEventListener("input", () => {
  grow();
  showState();
});

composer.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !composer.value && !turns.has(current.id)) {
    const last = current.messages.findLast(({ role }) => role === "user");
    if (!last) return;
    event.preventDefault();
    views.get(last.id).edit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (turns.has(current.id)) turns.get(current.id).stop();
  else if (!wide.matches) setSidebar(false);
});

$("messages").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  // Without the last line break, at which a terminal would run what is pasted.
  if (button) copy(button.closest(".code").querySelector("code").textContent.replace(/\n$/, ""), button);
});

$("new-chat").addEventListener("click", () => create("chat"));
$("new-notebook").addEventListener("click", () => create("notebook"));
$("show-sidebar").addEventListener("click", () => setSidebar(true));
$("hide-sidebar").addEventListener("click", () => setSidebar(false));
$("shade").addEventListener("click", () => setSidebar(false));
$("export").addEventListener("click", () => download("pagoda-conversations.json", [...conversations.values()]));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", ({ target }) => {
  if (target.files[0]) importFile(target.files[0]);
  target.value = "";
});
$("open-settings").addEventListener("click", () =>
  openSettings({
    conversation: current,
    model,
    save: () => conversations.has(current.id) && save(current, true),
    exportThis: () => download("pagoda-conversation.json", [current]),
    removeAll: async () => {
      for (const id of [...conversations.keys()]) {
        turns.get(id)?.stop();
        conversations.delete(id);
        await store.remove(id);
      }
      create(current.mode);
    },
  }),
);
$("model").addEventListener("change", ({ target }) => chooseModel(models[target.selectedIndex]));
addEventListener("hashchange", () => {
  const conversation = conversations.get(location.hash.slice(1));
  if (conversation && conversation.id !== current.id) open(conversation);
});
addEventListener("pagehide", () => {
  for (const id of saving.keys()) write(conversations.get(id));
});

// ---- beginning

function chooseModel(chosen) {
  model = chosen;
  for (const view of views.values()) {
    view.limit = model.max_model_len;
    view.refresh();
  }
  showState();
}

async function loadModels() {
  showBanner("");
  try {
    const { data } = await (await request("v1/models")).json();
    if (!data?.length) throw new Error("The server names no model.");
    models = data.map(({ id, max_model_len, has_chat_template, default_sampling_params }) => ({
      id,
      max_model_len,
      has_chat_template,
      defaults: default_sampling_params,
    }));
    const options = models.map(({ id }) => h("option", {}, id));
    $("model").replaceChildren(...options);
    $("model").disabled = models.length < 2;
    chooseModel(models[0]);
    const fresh = !conversations.has(current.id) && !current.messages.length && !composer.value;
    if (model.has_chat_template === false) {
      $("new-chat").title = "This model has no chat template: a notebook suits it";
      if (fresh) create("notebook");
    }
    // Stored messages may have been shown without the key that formatting needs.
    for (const [id, view] of views) if (!turns.has(current.id)) view.sync(current.messages.find((m) => m.id === id));
  } catch (error) {
    showBanner(error.message, "Try again", loadModels);
  }
}

async function start() {
  const kept = await store.open();
  if (!kept) showBanner("This browser does not keep conversations: they are lost when the page is closed.");
  for (const conversation of await store.all()) conversations.set(conversation.id, conversation);
  for (const conversation of conversations.values()) settle(conversation);
  setSidebar(wide.matches);
  const asked = conversations.get(location.hash.slice(1));
  if (asked) open(asked);
  else create();
  store.onChange(follow);
  await loadModels();
}

start();
