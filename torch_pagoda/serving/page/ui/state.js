// What is open and what runs, shared by the page's parts; conversations and their way into the store.

import * as store from "./store.js";

const SAVE_EVERY = 700; // ms, while text streams
const STALE = 10_000; // ms without a sign of the tab that streams

export const conversations = new Map();
export const turns = new Map(); // of conversations that this tab answers
export const state = {
  models: [{ id: "" }],
  model: { id: "" },
  current: null,
  unsaved: () => {}, // called when the browser refuses to keep a conversation
};

const saving = new Map();
const removed = new Set();

export function save(conversation, now = false) {
  const { id } = conversation;
  if (removed.has(id)) return;
  conversation.updated = Date.now();
  conversations.set(id, conversation);
  if (now) {
    clearTimeout(saving.get(id));
    write(conversation);
  } else if (!saving.has(id)) saving.set(id, setTimeout(() => write(conversation), SAVE_EVERY));
}

async function write(conversation) {
  saving.delete(conversation.id);
  if (removed.has(conversation.id)) return;
  conversation.owner = turns.has(conversation.id) ? store.tab : "";
  try {
    await store.put(conversation);
  } catch {
    state.unsaved();
  }
}

export function saveAll() {
  for (const id of saving.keys()) write(conversations.get(id));
}

export async function drop(id) {
  turns.get(id)?.stop();
  removed.add(id);
  conversations.delete(id);
  await store.remove(id);
}

export function restore(conversation) {
  removed.delete(conversation.id);
  save(conversation, true);
}

const runOf = ({ mode, run, messages }) => (mode === "notebook" ? run : messages.at(-1));

export const isStreaming = (conversation) => runOf(conversation)?.status === "streaming";

// An answer that was streaming when its page was closed is one that was stopped.
export function settle(conversation) {
  if (!isStreaming(conversation) || turns.has(conversation.id)) return;
  const gone = conversation.owner === store.tab || Date.now() - conversation.updated > STALE;
  if (gone) runOf(conversation).status = "stopped";
}

export async function load() {
  const kept = await store.open();
  for (const conversation of await store.all()) conversations.set(conversation.id, conversation);
  for (const conversation of conversations.values()) settle(conversation);
  if (!kept) state.unsaved();
}
