// A notebook: one text that the model continues. What a model without a chat template can do.

import { $, announce, h, icon } from "./dom.js";
import { statsLine } from "./messages.js";
import { conversations, save, state, turns } from "./state.js";
import { Turn } from "./turn.js";

export class Notebook {
  #area = $("notebook-text");
  #conversation = null;
  #frame = 0;

  // `changed` is called when a text is begun, changed, or continued.
  constructor(changed) {
    this.changed = changed;
    this.#area.addEventListener("input", () => {
      this.#conversation.text = this.#area.value;
      delete this.#conversation.before;
      const isNew = !conversations.has(this.#conversation.id);
      save(this.#conversation);
      this.refresh();
      if (isNew) this.changed();
    });
    this.#area.addEventListener("change", () => this.changed());
    this.#area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.run();
    });
    $("notebook-run").addEventListener("click", () => (this.#turn ? this.#turn.stop() : this.run()));
    $("notebook-undo").addEventListener("click", () => this.undo());
    $("notebook-again").addEventListener("click", () => {
      this.undo();
      this.run();
    });
  }

  get #turn() {
    return turns.get(this.#conversation?.id);
  }

  show(conversation) {
    this.#conversation = conversation;
    this.#area.value = conversation.text;
    this.#area.scrollTop = this.#area.scrollHeight;
    this.refresh();
  }

  focus() {
    this.#area.focus();
    this.#area.setSelectionRange(this.#area.value.length, this.#area.value.length);
  }

  refresh() {
    const { run: { status, error, stats } = {}, before, text } = this.#conversation;
    const streams = status === "streaming";
    const own = Boolean(this.#turn);
    this.#area.readOnly = streams;
    this.#area.setAttribute("aria-busy", streams);
    const button = $("notebook-run");
    button.disabled = streams ? !own : !text;
    button.replaceChildren(icon(own ? "stop" : "continue"), own ? "Stop" : "Continue");
    $("notebook-undo").disabled = $("notebook-again").disabled = streams || before === undefined;
    const live = own ? this.#turn.stats : stats;
    $("notebook-stats").textContent = statsLine(live, streams ? 0 : state.model.max_model_len);
    const failed = status === "error" && error;
    const wait = error?.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    $("notebook-error").replaceChildren(
      failed ? h("div", { class: "error", role: "alert" }, icon("warning"), h("p", {}, `${error.message}${wait}`)) : "",
    );
  }

  undo() {
    const conversation = this.#conversation;
    if (conversation.before === undefined || this.#turn) return;
    conversation.text = conversation.before;
    delete conversation.before;
    delete conversation.run;
    save(conversation);
    this.show(conversation);
    this.focus();
  }

  async run() {
    const conversation = this.#conversation;
    if (this.#turn || !conversation.text) return;
    conversation.before = conversation.text;
    conversation.run = { status: "streaming" };
    const turn = new Turn(conversation, state.model, (kind, text) => {
      if (kind === "content") conversation.text += text;
      this.#later(conversation);
      save(conversation);
    });
    turns.set(conversation.id, turn);
    this.changed();
    this.refresh();
    announce("The model continues the text");
    await turn.complete(conversation.run, conversation.before);
    turns.delete(conversation.id);
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#draw(conversation);
    save(conversation, true);
    this.changed();
    announce(conversation.text.slice(conversation.before.length) || "Nothing was added");
  }

  #later(conversation) {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw(conversation);
    });
  }

  #draw(conversation) {
    if (conversation !== this.#conversation) return;
    const area = this.#area;
    const atEnd = area.scrollHeight - area.scrollTop - area.clientHeight < 60;
    const { text } = conversation;
    if (text.startsWith(area.value)) area.setRangeText(text.slice(area.value.length), area.value.length, area.value.length);
    else area.value = text;
    if (atEnd) area.scrollTop = area.scrollHeight;
    this.refresh();
  }
}
