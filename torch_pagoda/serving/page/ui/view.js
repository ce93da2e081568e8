// The open conversation, the list beside it, and the notices.

import { $, button, h, icon } from "./dom.js";
import { MessageView } from "./messages.js";
import { Notebook } from "./notebook.js";
import { defaultSettings } from "./settings.js";
import { showList, showSidebar, titleOf, wide } from "./sidebar.js";
import { conversations, drop, isStreaming, restore, save, settle, state, turns } from "./state.js";
import * as store from "./store.js";

const views = new Map(); // of the open conversation's messages
const scroller = $("scroller");
const composer = $("message");
const notebook = new Notebook(() => {
  setAddress();
  showState();
});
let pinned = true; // to the end of the messages
let actions = {}; // what can be done with a message

export const setActions = (given) => {
  actions = given;
};

const chats = (model) => model.capabilities?.chat !== false;

export const newMode = () => (chats(state.model) ? "chat" : "notebook");

export function create(mode = newMode()) {
  open({ ...store.emptyConversation(mode), settings: defaultSettings() });
}

export function setAddress() {
  const hash = conversations.has(state.current.id) ? `#${state.current.id}` : "";
  history.replaceState(null, "", `${location.pathname}${location.search}${hash}`);
}

export function open(conversation) {
  state.current = conversation;
  settle(conversation);
  setAddress();
  const isNotebook = conversation.mode === "notebook";
  $("notebook").hidden = !isNotebook;
  scroller.hidden = $("dock").hidden = isNotebook;
  showAnew();
  if (!wide.matches) showSidebar(false);
  // On a phone the keyboard would cover what was opened.
  if (wide.matches) (isNotebook ? notebook : composer).focus();
}

// Another tab has changed a conversation or removed it.
export async function follow(id) {
  if (turns.has(id)) return;
  const fresh = await store.get(id);
  if (turns.has(id)) return;
  if (!fresh) {
    conversations.delete(id);
    if (state.current.id === id) create(state.current.mode);
  } else {
    settle(fresh);
    conversations.set(id, fresh);
    if (state.current.id === id) {
      state.current = fresh;
      showMessages();
    }
  }
  showState();
}

export function showAnew() {
  views.clear();
  $("messages").replaceChildren();
  pinned = true;
  showMessages();
  showState();
}

export function showMessages() {
  const { current, model } = state;
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

export const viewOf = (message) => views.get(message.id);

// Its view is made anew, in its place.
export function replaceView(message) {
  const { element } = viewOf(message);
  const focus = element.contains(document.activeElement) && document.activeElement.ariaLabel;
  const fresh = new MessageView(message, actions, state.model.max_model_len);
  element.replaceWith(fresh.element);
  views.set(message.id, fresh);
  if (focus) (fresh.element.querySelector(`[aria-label="${focus}"]:enabled`) ?? fresh.element).focus();
}

function emptyPage({ id, max_model_len: limit }) {
  const facts = [id, limit ? `${limit.toLocaleString("en")} tokens of context` : ""].filter(Boolean).join(" · ");
  const question = h("p", { class: "big" }, "What would you like to ask?");
  return h("div", { class: "empty" }, h("img", { src: "ui/icon.svg", alt: "" }), question, h("p", { class: "meta" }, facts));
}

export function showState() {
  const { current, model } = state;
  const title = titleOf(current);
  $("title").textContent = title;
  document.title = conversations.has(current.id) ? `${title} – pagoda` : "pagoda";
  showList(conversations.values(), current.id, { open: (id) => open(conversations.get(id)), rename, remove });
  $("messages").querySelector(".empty")?.remove();
  if (!current.messages.length) $("messages").append(emptyPage(model));
  showComposer();
  showContext(current, model);
}

export function showComposer() {
  const { current } = state;
  const own = turns.has(current.id);
  const elsewhere = !own && isStreaming(current);
  const send = $("send");
  const label = own ? "Stop" : "Send";
  if (send.title !== label) {
    send.title = label;
    send.setAttribute("aria-label", label);
    send.replaceChildren(icon(own ? "stop" : "send"));
  }
  send.disabled = elsewhere || (!own && !composer.value.trim());
  composer.placeholder = elsewhere ? "Being answered in another tab" : "Ask something";
}

function showContext({ messages }, { max_model_len: limit }) {
  const stats = messages.findLast((message) => message.stats?.promptTokens != null)?.stats;
  $("context").hidden = !stats || !limit;
  if (!stats || !limit) return;
  const used = stats.promptTokens + stats.tokens;
  const meter = $("context-meter");
  meter.max = limit;
  meter.high = limit * 0.9;
  meter.value = used;
  $("context-text").textContent = `${used.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens`;
}

export function showModel() {
  const { model } = state;
  for (const view of views.values()) {
    view.limit = model.max_model_len;
    view.refresh();
    view.format();
  }
  $("new-chat").hidden = !chats(model);
  showState();
}

function rename(conversation, title) {
  conversation.title = title;
  save(conversation, true);
  showState();
}

async function remove(conversation) {
  await drop(conversation.id);
  if (state.current.id === conversation.id) create(conversation.mode);
  showState();
  toast("The conversation was deleted.", () => {
    restore(conversation);
    open(conversation);
  });
}

export function showBanner(text, label, action) {
  $("banner").hidden = !text;
  $("banner").replaceChildren(h("p", {}, text), action ? button(label, action) : "");
}

let toastTimer = 0;

export function toast(text, undo) {
  $("toast")?.remove();
  clearTimeout(toastTimer);
  const box = h("div", { id: "toast", role: "status" }, text);
  const end = () => box.remove();
  box.append(h("button", { type: "button", class: "link", onclick: () => (undo(), end()) }, "Undo"));
  document.body.append(box);
  toastTimer = setTimeout(end, 10_000);
}

export function toEnd() {
  pinned = true;
  keepEnd();
}

let shownTop = 0; // where the page has scrolled to

function keepEnd() {
  if (pinned) scroller.scrollTop = scroller.scrollHeight;
  shownTop = scroller.scrollTop;
  $("to-end").hidden = pinned;
}

scroller.addEventListener(
  "scroll",
  () => {
    const { scrollTop, scrollHeight, clientHeight } = scroller;
    // Only the reader scrolls upwards: text may have come since the page has scrolled down.
    if (scrollHeight - scrollTop - clientHeight < 48) pinned = true;
    else if (scrollTop < shownTop - 2) pinned = false;
    $("to-end").hidden = pinned;
  },
  { passive: true },
);
new ResizeObserver(keepEnd).observe($("messages"));
new ResizeObserver(keepEnd).observe(scroller);
$("to-end").addEventListener("click", toEnd);
showSidebar(wide.matches);
wide.addEventListener("change", () => showSidebar(wide.matches));
