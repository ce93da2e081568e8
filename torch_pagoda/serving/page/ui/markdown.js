// Text of answers as formatted blocks. The HTML is made by the server's route and by nothing else; until it comes, and
// where it does not, the text stands as it is.

import { request } from "./api.js";
import { announce, h, icon } from "./dom.js";

const MAX_TEXTS = 32;
const MAX_CHARACTERS = 150_000;
const MIN_INTERVAL = 250;
// The server spends at most one part in this many of its time on one stream's formatting.
const REST = 6;

const trusted = globalThis.trustedTypes?.createPolicy("rendered-markdown", { createHTML: (html) => html });

function elementOf(html) {
  const template = document.createElement("template");
  template.innerHTML = trusted ? trusted.createHTML(html) : html;
  const block = h("div", { class: "block" }, template.content);
  for (const pre of block.querySelectorAll("pre")) {
    const name = pre.dataset.language;
    pre.tabIndex = 0;
    const button = h("button", { type: "button", class: "link copy-code", "aria-label": "Copy code" }, icon("copy"), "Copy");
    const frame = h("div", { class: "code" }, h("div", { class: "bar" }, h("span", {}, name), button));
    pre.replaceWith(frame);
    frame.append(pre);
  }
  for (const table of block.querySelectorAll("table")) {
    const frame = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return block;
}

async function render(texts) {
  const response = await request("ui/markdown", { body: { texts }, quiet: true });
  return (await response.json()).results;
}

// The server begins its renderer with the first text: better before the answer is there.
export const warm = () => render([""]).catch(() => {});

let queue = [];

// Stored messages that are shown together are rendered together.
function renderLater(text) {
  return new Promise((resolve, reject) => {
    queue.push({ text, resolve, reject });
    if (queue.length === 1) queueMicrotask(flush);
  });
}

function flush() {
  const waiting = queue;
  queue = [];
  while (waiting.length) {
    const batch = [waiting.shift()];
    let size = batch[0].text.length;
    while (waiting.length && batch.length < MAX_TEXTS && size + waiting[0].text.length <= MAX_CHARACTERS) {
      size += waiting[0].text.length;
      batch.push(waiting.shift());
    }
    render(batch.map((entry) => entry.text)).then(
      (results) => batch.forEach((entry, i) => entry.resolve(results[i])),
      (error) => batch.forEach((entry) => entry.reject(error)),
    );
  }
}

const CONTAINERS = new Set(["BLOCKQUOTE", "CODE", "DIV", "LI", "OL", "P", "PRE", "UL", "H1", "H2", "H3", "H4", "H5", "H6"]);

// Where text that follows a block belongs until it is rendered; null inside a table, where it would tear the cells.
function endOf(block) {
  let element = block;
  for (;;) {
    const last = element.lastElementChild;
    if (!last || last.nodeName === "SPAN") return element;
    if (element.nodeName === "P" || element.nodeName === "CODE" || /^H\d$/.test(element.nodeName)) return element;
    if (!CONTAINERS.has(last.nodeName) || last.classList.contains("table")) return null;
    element = last;
  }
}

export class Markdown {
  #source = "";
  #settled = 0; // characters whose blocks do not change any more
  #rendered = 0; // characters that the blocks show
  #tail = []; // {html, element} of the blocks after the settled characters
  #blocks = []; // all of them
  #pending = document.createTextNode("");
  #pendingBox = h("span", { class: "pending" }, this.#pending);
  #timer = 0;
  #frame = 0;
  #busy = null;
  #speaks = false;

  constructor() {
    this.element = h("div", { class: "md" });
  }

  // A whole text, at once.
  async show(text) {
    this.#source = text.replaceAll("\r", "");
    this.#paint();
    await this.#renderAll(renderLater);
  }

  // Once more, where the server did not format the text at first.
  retry() {
    if (!this.#busy && !this.#timer && this.#rendered < this.#source.length) this.#renderAll(renderLater);
  }

  // More text, of a stream.
  append(text) {
    this.#speaks = true;
    this.#source += text.replaceAll("\r", "");
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#paint();
    });
    if (!this.#timer && !this.#busy) this.#timer = setTimeout(() => this.#renderTail(), MIN_INTERVAL);
  }

  // The stream's end: all of it is rendered once more, as link references may stand behind their use.
  async finish() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    await this.#busy;
    clearTimeout(this.#timer);
    this.#timer = 0;
    cancelAnimationFrame(this.#frame);
    this.#paint();
    if (this.#source.length > MAX_CHARACTERS) {
      this.#renderTail();
      await this.#busy;
    } else await this.#renderAll(async (text) => (await render([text]))[0]);
    if (this.#speaks) this.#speak(this.#tail);
  }

  #paint() {
    const text = this.#source.slice(this.#rendered);
    if (!text) {
      this.#pendingBox.remove();
      return;
    }
    if (text.startsWith(this.#pending.data)) this.#pending.appendData(text.slice(this.#pending.data.length));
    else this.#pending.data = text;
    const last = this.#blocks.at(-1)?.element;
    const begins = !last || (/\n[ \t]*\n$/.test(this.#source.slice(0, this.#rendered)) && !last.querySelector("pre"));
    const place = begins ? this.element : endOf(last);
    if (!place) this.#pendingBox.remove();
    else if (this.#pendingBox.parentNode !== place || place.lastChild !== this.#pendingBox) place.append(this.#pendingBox);
  }

  #renderTail() {
    this.#timer = 0;
    const started = performance.now();
    const end = this.#source.length;
    const text = this.#source.slice(this.#settled, end);
    this.#busy = render([text])
      .then(([blocks]) => this.#show(text, blocks, end))
      .catch(() => {})
      .finally(() => {
        this.#busy = null;
        const wait = Math.max(MIN_INTERVAL, REST * (performance.now() - started));
        if (this.#source.length > end) this.#timer = setTimeout(() => this.#renderTail(), wait);
      });
  }

  #show(text, blocks, end) {
    const before = this.#blocks.length - this.#tail.length;
    this.#tail = this.#replace(before, blocks);
    this.#rendered = end;
    // A block that begins in the last line may yet join the one before: "2" becomes "2." of the list above it.
    const lastLine = text.split("\n").length - 1;
    let first = blocks.length - 1;
    while (first > 0 && blocks[first].line >= lastLine) first -= 1;
    if (first > 0) {
      this.#speak(this.#tail.slice(0, first));
      this.#tail = this.#tail.slice(first);
      this.#settled += offsetOf(text, blocks[first].line);
    }
    this.#paint();
  }

  async #renderAll(ask, tries = 4) {
    const text = this.#source;
    try {
      const blocks = await ask(text);
      if (text !== this.#source) return;
      const settled = this.#blocks.length - this.#tail.length;
      this.#replace(0, blocks);
      this.#tail = this.#blocks.slice(settled);
      this.#rendered = text.length;
    } catch (error) {
      // The text stands there as it is.
      if (error.status === 429 && tries > 1) {
        await new Promise((resolve) => setTimeout(resolve, 1000 * (error.retryAfter || 1)));
        return this.#renderAll(ask, tries - 1);
      }
    }
    this.#paint();
  }

  // Puts blocks in the place of those from `start`; those whose HTML is the same are left alone.
  #replace(start, blocks) {
    this.#pendingBox.remove();
    const fresh = blocks.map(({ html }, i) => {
      const old = this.#blocks[start + i];
      if (old?.html === html) return old;
      const element = elementOf(html);
      if (old) old.element.replaceWith(element);
      else this.element.append(element);
      return { html, element };
    });
    for (const extra of this.#blocks.slice(start + fresh.length)) extra.element.remove();
    this.#blocks.splice(start, Infinity, ...fresh);
    return fresh;
  }

  #speak(blocks) {
    for (const { element } of blocks) {
      const code = element.querySelector("pre");
      announce(code ? `Code: ${code.textContent}` : element.textContent);
    }
  }
}

function offsetOf(text, line) {
  let offset = 0;
  for (let i = 0; i < line; i += 1) offset = text.indexOf("\n", offset) + 1;
  return offset;
}
