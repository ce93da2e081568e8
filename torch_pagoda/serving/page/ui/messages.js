// Messages as they are shown: text, reasoning, tool calls, errors, figures, and what can be done with them.

import { button, copy, h, icon, iconButton, number } from "./dom.js";
import { Markdown } from "./markdown.js";

// A turn's figures in one line.
export function statsLine(stats, limit) {
  if (!stats) return "";
  const { tokens, counted, perSecond, firstAfter, promptTokens, cachedTokens } = stats;
  const parts = [`${counted ? "" : "about "}${number(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  if (perSecond !== null) parts.push(`${number(perSecond, perSecond < 100 ? 1 : 0)} tok/s`);
  if (firstAfter !== null) parts.push(`first token ${seconds(firstAfter)}`);
  if (cachedTokens !== null) parts.push(`${number(cachedTokens)} of ${number(promptTokens)} cached`);
  if (promptTokens !== null) {
    const used = number(promptTokens + tokens);
    parts.push(limit ? `context ${used} of ${number(limit)}` : `context ${used}`);
  }
  return parts.join(" · ");
}

const seconds = (value) => (value < 1 ? `${number(value * 1000)} ms` : `${number(value, 1)} s`);

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

export class MessageView {
  #markdown = null;
  #reasoning = null;
  #editor = null;

  // `actions`: {edit(message, text, sends), again(message), goOn(message), pick(message, step)}; `limit`: context length.
  constructor(message, actions, limit) {
    this.message = message;
    this.actions = actions;
    this.limit = limit;
    const name = { user: "You", assistant: "Answer", tool: "Tool result" }[message.role];
    this.body = h("div", { class: "body" });
    this.tools = h("div", { class: "tool-calls" });
    this.notice = h("div", { class: "notice" });
    this.meta = h("p", { class: "meta" });
    this.buttons = h("div", { class: "actions" });
    this.element = h(
      "article",
      { class: `message ${message.role}`, "aria-label": name, tabindex: -1 },
      this.body,
      this.tools,
      this.notice,
      h("footer", {}, this.buttons, this.meta),
    );
    this.#fill();
  }

  #fill() {
    const { role, content, reasoning } = this.message;
    this.body.replaceChildren();
    this.#reasoning = null;
    this.shown = content;
    if (role === "assistant") {
      if (reasoning) this.appendReasoning(reasoning);
      this.#markdown = new Markdown();
      this.body.append(this.#markdown.element);
      if (content) this.#markdown.show(content);
    } else this.body.append(h("div", { class: "plain" }, content));
    this.refresh();
  }

  appendContent(text) {
    this.shown += text;
    this.element.classList.remove("waiting");
    this.#markdown.append(text);
  }

  appendReasoning(text) {
    if (!this.#reasoning) {
      const summary = h("summary", {}, "");
      const plain = h("div", { class: "plain", tabindex: 0 });
      const box = h("details", { class: "reasoning" }, summary, plain);
      this.#reasoning = { summary, plain, box };
      this.body.prepend(box);
      this.#nameReasoning();
    }
    this.element.classList.remove("waiting");
    this.#reasoning.plain.append(text);
  }

  #nameReasoning() {
    if (!this.#reasoning) return;
    const { status, content, reasoningSeconds, toolCalls } = this.message;
    const thinks = status === "streaming" && !content && !toolCalls?.length;
    const took = reasoningSeconds ? `Thought for ${seconds(reasoningSeconds)}` : "Thoughts";
    this.#reasoning.summary.textContent = thinks ? "Thinking…" : took;
  }

  // Follows the message as it stands in the store: what another tab has added, or a change of all of it.
  sync(message) {
    const before = this.message;
    this.message = message;
    if (message.role === "assistant" && before.reasoning === message.reasoning && message.content.startsWith(this.shown)) {
      const more = message.content.slice(this.shown.length);
      if (more) this.appendContent(more);
      if (message.status !== "streaming" && before.status === "streaming") this.end();
      else this.refresh();
    } else if (message.content !== this.shown || before.reasoning !== message.reasoning) this.#fill();
    else this.refresh();
  }

  async end() {
    this.refresh();
    await this.#markdown?.finish();
  }

  refresh() {
    const { status, stats, toolCalls } = this.message;
    const streams = status === "streaming";
    this.element.setAttribute("aria-busy", streams);
    this.element.classList.toggle("waiting", streams && !this.message.content && !this.message.reasoning && !toolCalls);
    this.#nameReasoning();
    this.tools.replaceChildren(...(toolCalls ?? []).map(toolCard));
    this.meta.textContent = statsLine(stats, this.limit);
    this.#notice();
    this.#actions(streams);
  }

  format() {
    this.#markdown?.retry();
  }

  live(stats) {
    this.meta.textContent = statsLine(stats, 0);
  }

  #notice() {
    const { status, error, finish } = this.message;
    if (status === "error") {
      const kept = this.message.content ? " The text so far is kept." : "";
      const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
      const title = { 429: "The server is busy.", 401: "The server asks for a key." }[error.status];
      this.notice.replaceChildren(
        h(
          "div",
          { class: "error", role: "alert" },
          icon("warning"),
          h("p", {}, title ? h("strong", {}, `${title} `) : null, `${error.message}${wait}${kept}`),
          button("Try again", () => this.actions.again(this.message)),
        ),
      );
    } else if (status === "stopped") this.notice.replaceChildren(h("p", { class: "meta" }, "Stopped."));
    else if (finish === "length") this.notice.replaceChildren(h("p", { class: "meta" }, "Cut at the limit of tokens."));
    else this.notice.replaceChildren();
  }

  #actions(streams) {
    // Who has pressed one of these by the keyboard stays here.
    if (this.buttons.contains(document.activeElement)) this.element.focus({ preventScroll: true });
    const { message, actions } = this;
    if (streams || this.#editor || (message.status === "error" && !message.content)) {
      this.buttons.replaceChildren();
      return;
    }
    const { role, status, finish, versions = [], version = 0 } = message;
    const buttons = [];
    if (versions.length > 1) {
      buttons.push(
        iconButton("left", "Previous answer", () => actions.pick(message, -1), { disabled: version === 0 }),
        h("span", { class: "meta" }, `${version + 1} of ${versions.length}`),
        iconButton("right", "Next answer", () => actions.pick(message, 1), { disabled: version === versions.length - 1 }),
      );
    }
    const copies = iconButton("copy", role === "user" ? "Copy message" : "Copy answer", () => copy(message.content, copies));
    buttons.push(copies, iconButton("edit", role === "user" ? "Edit message" : "Edit answer", () => this.edit()));
    if (role === "assistant") {
      buttons.push(iconButton("retry", "Answer again", () => actions.again(message)));
      if (message.content && (status !== "done" || finish === "length" || message.edited)) {
        buttons.push(iconButton("continue", "Continue the answer", () => actions.goOn(message)));
      }
    }
    this.buttons.replaceChildren(...buttons);
  }

  // Puts an editor in the place of the text.
  edit() {
    if (this.#editor) return;
    const { role, content } = this.message;
    const area = h("textarea", { "aria-label": role === "user" ? "Edit your message" : "Edit the answer", rows: 3 });
    area.value = content;
    const close = (text, sends) => {
      this.#editor = null;
      this.element.classList.remove("editing");
      if (text !== null && (text !== content || sends)) this.actions.edit(this.message, text, sends);
      this.#fill();
      this.buttons.querySelector("[aria-label^=Edit]")?.focus();
    };
    const sends = role === "user";
    const grow = () => {
      area.style.height = "auto";
      area.style.height = `${area.scrollHeight + 2}px`;
    };
    area.addEventListener("input", grow);
    area.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        close(null);
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey || (sends && !event.shiftKey))) {
        event.preventDefault();
        close(area.value, sends);
      }
    });
    this.#editor = h(
      "div",
      { class: "editor" },
      area,
      h(
        "div",
        { class: "row end" },
        button("Cancel", () => close(null)),
        button("Save", () => close(area.value, false), sends ? "" : "primary"),
        sends ? button("Save and send", () => close(area.value, true), "primary") : null,
      ),
    );
    this.element.classList.add("editing");
    this.body.replaceChildren(this.#editor);
    this.buttons.replaceChildren();
    grow();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

function toolCard({ name, arguments: given }) {
  return h(
    "section",
    { class: "tool-call", "aria-label": `Call of ${name}` },
    h("p", {}, icon("tool"), h("strong", {}, name || "…")),
    h("pre", { tabindex: 0 }, h("code", {}, pretty(given))),
  );
}
