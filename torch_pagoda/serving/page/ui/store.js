// Conversations in IndexedDB, and word to the page's other tabs when one changes.

import { identifier } from "./dom.js";
import { inTab } from "./kept.js";

const channel = new BroadcastChannel("pagoda");
const memory = new Map();
let database = null;

const outcome = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

// The same over a reload, so that a tab knows an answer that it had begun itself.
export const tab = inTab.get("pagoda-tab") || identifier();
inTab.set("pagoda-tab", tab);

// False where the browser keeps nothing: conversations then last as long as the page.
export async function open() {
  try {
    const opening = indexedDB.open("pagoda", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
    database = await outcome(opening);
    return true;
  } catch {
    return false;
  }
}

const table = (mode) => database.transaction("conversations", mode).objectStore("conversations");

export const get = (id) => (database ? outcome(table("readonly").get(id)) : structuredClone(memory.get(id)));

export const all = async () => (database ? outcome(table("readonly").getAll()) : [...memory.values()]);

export async function put(conversation) {
  if (database) await outcome(table("readwrite").put(conversation));
  else memory.set(conversation.id, structuredClone(conversation));
  channel.postMessage({ id: conversation.id });
}

export async function remove(id) {
  if (database) await outcome(table("readwrite").delete(id));
  else memory.delete(id);
  channel.postMessage({ id });
}

// Calls back with the id of a conversation that another tab has changed or removed.
export const onChange = (callback) => channel.addEventListener("message", ({ data }) => callback(data.id));

const text = (value, limit = 4_000_000) => (typeof value === "string" ? value.slice(0, limit) : "");
const plain = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});

export const emptyConversation = (mode) => ({
  id: identifier(),
  mode,
  title: "",
  created: Date.now(),
  updated: Date.now(),
  settings: {},
  messages: [],
  text: "",
});

export const emptyMessage = (role, content = "") => ({ id: identifier(), role, content, status: "done" });

function asMessage(value) {
  const { role, content, reasoning, toolCalls, toolCallId } = plain(value);
  if (!["user", "assistant", "tool"].includes(role)) return null;
  const message = emptyMessage(role, text(content));
  if (reasoning) message.reasoning = text(reasoning);
  if (role === "tool") message.toolCallId = text(toolCallId, 200);
  if (Array.isArray(toolCalls)) {
    message.toolCalls = toolCalls.slice(0, 128).map((call) => ({
      id: text(plain(call).id, 200),
      name: text(plain(call).name, 200),
      arguments: text(plain(call).arguments),
    }));
  }
  return message;
}

// The conversations of an exported file, under new ids; what is not of the right kind is left out.
export function conversationsOf(json) {
  const list = plain(json).conversations;
  if (!Array.isArray(list)) throw new Error("The file holds no conversations.");
  return list.slice(0, 10_000).map((value) => {
    const { mode, title, created, updated, settings, messages, text: body } = plain(value);
    const kept = Object.entries(plain(settings)).filter(([, entry]) => typeof entry === "string");
    return {
      ...emptyConversation(mode === "notebook" ? "notebook" : "chat"),
      title: text(title, 200),
      created: Number(created) || Date.now(),
      updated: Number(updated) || Date.now(),
      settings: Object.fromEntries(kept),
      messages: (Array.isArray(messages) ? messages : []).map(asMessage).filter(Boolean),
      text: text(body),
    };
  });
}

export const exported = (conversations) => JSON.stringify({ format: "pagoda-chat", version: 1, conversations }, null, 1);
