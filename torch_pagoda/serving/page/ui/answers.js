// What can be asked: a message, an answer again, its continuation, a change of what was said.

import { announce } from "./dom.js";
import { warm } from "./markdown.js";
import { conversations, save, state, turns } from "./state.js";
import { emptyMessage } from "./store.js";
import { Turn } from "./turn.js";
import { replaceView, setActions, setAddress, showAnew, showMessages, showState, toast, toEnd, viewOf } from "./view.js";

const ENDS = { done: "The answer is complete.", stopped: "Stopped.", error: "The answer failed." };

// What belongs to one version of an answer.
const PARTS = ["content", "reasoning", "reasoningSeconds", "toolCalls", "stats", "finish", "status", "edited", "error"];

const partsOf = (message) => Object.fromEntries(PARTS.map((part) => [part, message[part]]));

export function ask(text) {
  state.current.messages.push(emptyMessage("user", text));
  answer();
}

function answer() {
  const message = emptyMessage("assistant");
  state.current.messages.push(message);
  run(message);
}

async function run(message, continues = false) {
  const conversation = state.current;
  const view = () => (state.current === conversation ? viewOf(message) : null);
  let frame = 0;
  const turn = new Turn(conversation, state.model, (kind, delta) => {
    if (kind === "content") view()?.appendContent(delta);
    if (kind === "reasoning") view()?.appendReasoning(delta);
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      if (message.toolCalls) view()?.refresh();
      if (turns.get(conversation.id) === turn) view()?.live(turn.stats);
    });
    save(conversation);
  });
  turns.set(conversation.id, turn);
  message.status = "streaming";
  save(conversation, true);
  setAddress();
  showMessages();
  showState();
  toEnd();
  announce("Answering");
  warm();
  await turn.chat(message, continues);
  turns.delete(conversation.id);
  cancelAnimationFrame(frame);
  save(conversation, true);
  showState();
  await view()?.end();
  announce(ENDS[message.status]);
}

// Removes the messages behind one, which can be undone.
function cut(message) {
  const conversation = state.current;
  const start = conversation.messages.indexOf(message) + 1;
  const removed = conversation.messages.splice(start);
  if (!removed.length) return;
  const what = removed.length === 1 ? "1 later message was" : `${removed.length} later messages were`;
  toast(`${what} removed.`, () => {
    turns.get(conversation.id)?.stop();
    conversation.messages.splice(start, Infinity, ...removed);
    save(conversation, true);
    if (state.current === conversation) showAnew();
  });
}

function edit(message, text, sends) {
  message.content = text;
  if (message.role === "assistant") message.edited = true;
  save(state.current, true);
  if (!sends || turns.has(state.current.id)) return;
  cut(message);
  answer();
}

function again(message) {
  if (turns.has(state.current.id)) return;
  cut(message);
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

// Another version of an answer, a step further or back.
function pick(message, step) {
  message.versions[message.version] = partsOf(message);
  message.version += step;
  Object.assign(message, message.versions[message.version]);
  save(state.current, true);
  replaceView(message);
}

function goOn(message) {
  if (turns.has(state.current.id)) return;
  cut(message);
  run(message, true);
}

setActions({ edit, again, goOn, pick });

export const isAnswering = () => turns.has(state.current.id);

export const stop = () => turns.get(state.current.id)?.stop();

export const isStored = () => conversations.has(state.current.id);
