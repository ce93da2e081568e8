// The server's API: requests with the key, errors as it words them, server-sent events.

import { $ } from "./dom.js";
import { inTab } from "./kept.js";

export class ApiError extends Error {
  constructor(message, { status = 0, code = "", retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

const KEY = "pagoda-key";

export const storedKey = { get: () => inTab.get(KEY), set: (value) => inTab.set(KEY, value) };

let asking = null;

// One dialog for all requests that wait for the key; null when the reader cancels it.
function askKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key");
    const input = $("key-value");
    $("key-reason").textContent = refused ? "The server did not take that key." : "";
    input.value = "";
    dialog.returnValue = "";
    $("key-cancel").onclick = () => dialog.close();
    dialog.addEventListener(
      "close",
      () => {
        const value = dialog.returnValue === "ok" ? input.value.trim() : "";
        input.value = "";
        if (value) storedKey.set(value);
        resolve(value || null);
      },
      { once: true },
    );
    dialog.showModal();
    input.focus();
  }).finally(() => {
    asking = null;
  });
  return asking;
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy's page, perhaps: the status has to do.
  }
  const message = typeof error.message === "string" ? error.message : `The server answered ${response.status}.`;
  const retryAfter = Number.parseInt(response.headers.get("retry-after") ?? "", 10) || 0;
  return new ApiError(message, { status: response.status, code: String(error.code ?? ""), retryAfter });
}

// Paths are relative to the page, which may lie below a prefix. `quiet`: fail with 401 instead of asking for the key.
export async function request(path, { body, signal, quiet = false } = {}) {
  for (;;) {
    const key = storedKey.get();
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError("The server cannot be reached.");
    }
    if (response.ok) return response;
    // Another request may have asked for the key meanwhile: then that one is tried first.
    if (response.status === 401 && !quiet && (storedKey.get() !== key || (await askKey(key !== "")))) continue;
    throw await errorOf(response);
  }
}

// The JSON of each event up to [DONE]; comments are passed over, an error event is thrown.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line !== "" || data.length === 0) continue;
        const event = data.join("\n");
        data = [];
        if (event === "[DONE]") return;
        const parsed = JSON.parse(event);
        if (parsed.error) {
          throw new ApiError(parsed.error.message ?? "The server reported an error.", {
            code: String(parsed.error.code ?? ""),
          });
        }
        yield parsed;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server was lost.", { code: "connection_lost" });
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError("The connection to the server was lost.", { code: "connection_lost" });
}
