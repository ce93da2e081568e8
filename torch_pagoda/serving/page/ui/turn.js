// One answer while it streams: the request, its deltas, its figures, its end.

import { ApiError, events, request } from "./api.js";
import { samplingOf } from "./settings.js";

// What the server is sent of a conversation, up to the message that is to be written.
function messagesOf({ settings, messages }, upTo, continues) {
  const sent = [];
  if (settings.system?.trim()) sent.push({ role: "system", content: settings.system });
  for (const message of messages.slice(0, upTo + (continues ? 1 : 0))) {
    const { role, content, toolCalls, toolCallId } = message;
    if (role === "tool") sent.push({ role, content, tool_call_id: toolCallId });
    else if (role === "user") sent.push({ role, content });
    else if (toolCalls?.length) {
      const calls = toolCalls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
      sent.push({ role, content: content || null, tool_calls: calls });
    } else if (content) sent.push({ role, content });
  }
  return sent;
}

function samplingOrError(settings) {
  try {
    return samplingOf(settings);
  } catch (error) {
    throw new ApiError(`"More request fields" in the settings: ${error.message}`);
  }
}

// Figures of a turn, from the times of its chunks and the server's usage.
class Figures {
  #started = performance.now();
  #first = 0;
  #last = 0;
  chunks = 0;
  usage = null;

  arrived() {
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.chunks += 1;
  }

  // Tokens a second; while there is no usage yet, a chunk counts as a token.
  get stats() {
    const seconds = (this.#last - this.#first) / 1000;
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    return {
      firstAfter: this.#first ? (this.#first - this.#started) / 1000 : null,
      perSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      tokens,
      counted: this.usage !== null,
      promptTokens: this.usage?.prompt_tokens ?? null,
      cachedTokens: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
    };
  }
}

function addToolCalls(message, deltas) {
  message.toolCalls ??= [];
  for (const { index = 0, id, function: called } of deltas) {
    // Indices come from outside: an array with a hole of millions would freeze the page.
    if (!Number.isInteger(index) || index < 0 || index > message.toolCalls.length || index >= 128) continue;
    const call = (message.toolCalls[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}

export class Turn {
  #controller = new AbortController();
  #figures = new Figures();

  constructor(conversation, model, onChange) {
    this.conversation = conversation;
    this.model = model;
    this.onChange = onChange; // (kind, delta): "content", "reasoning", "tools", "end"
  }

  get stats() {
    return this.#figures.stats;
  }

  stop() {
    this.#controller.abort();
  }

  // Streams into the last message of a chat; `continues`: it is there in part and goes on.
  async chat(message, continues = false) {
    const { conversation, model } = this;
    const thinking = { since: 0 };
    await this.#run(message, "v1/chat/completions", () => ({
      model: model.id,
      messages: messagesOf(conversation, conversation.messages.indexOf(message), continues),
      ...(continues ? { add_generation_prompt: false, continue_final_message: true } : {}),
      ...samplingOrError(conversation.settings),
    }), ({ delta }) => {
      const reasoning = delta?.reasoning_content ?? delta?.reasoning;
      if (reasoning) {
        thinking.since ||= performance.now();
        message.reasoning = (message.reasoning ?? "") + reasoning;
        this.onChange("reasoning", reasoning);
      }
      if ((delta?.content || delta?.tool_calls?.length) && thinking.since) {
        message.reasoningSeconds = (performance.now() - thinking.since) / 1000;
        thinking.since = 0;
      }
      if (delta?.content) {
        message.content += delta.content;
        this.onChange("content", delta.content);
      }
      if (delta?.tool_calls?.length) {
        addToolCalls(message, delta.tool_calls);
        this.onChange("tools");
      }
      return Boolean(reasoning || delta?.content || delta?.tool_calls?.length);
    });
  }

  // Streams what follows a text; `message` takes status, figures and error, `onChange` the text.
  async complete(message, prompt) {
    await this.#run(message, "v1/completions", () => {
      const sampling = samplingOrError(this.conversation.settings);
      return { model: this.model.id, prompt, max_tokens: 256, ...sampling };
    }, ({ text }) => {
      if (text) this.onChange("content", text);
      return Boolean(text);
    });
  }

  async #run(message, path, bodyOf, take) {
    message.status = "streaming";
    delete message.error;
    delete message.finish;
    try {
      const { signal } = this.#controller;
      const body = { ...bodyOf(), stream: true, stream_options: { include_usage: true } };
      for await (const chunk of events(await request(path, { body, signal }))) {
        const choice = chunk.choices?.find(({ index }) => !index);
        if (chunk.usage) this.#figures.usage = chunk.usage;
        if (choice && take(choice)) this.#figures.arrived();
        if (choice?.finish_reason) message.finish = choice.finish_reason;
      }
      message.status = "done";
    } catch (error) {
      if (this.#controller.signal.aborted) message.status = "stopped";
      else {
        message.status = "error";
        const { status = 0, code = "", retryAfter = 0 } = error;
        const known = error instanceof ApiError;
        message.error = { message: known ? error.message : "The answer could not be read.", status, code, retryAfter };
      }
    }
    if (this.#figures.chunks || this.#figures.usage) message.stats = this.stats;
    this.onChange("end");
  }
}
