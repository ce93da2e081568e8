// What a reader can set: the theme for the page, the prompt and the sampling for a conversation.

import { storedKey } from "./api.js";
import { $, button, h, iconButton } from "./dom.js";
import { inBrowser } from "./kept.js";

// Name in the request → label, kind and bounds. An empty field leaves the choice to the server.
const NUMBERS = {
  temperature: { label: "Temperature", min: 0, max: 5, step: "any" },
  top_p: { label: "Top-p", min: 0, max: 1, step: "any" },
  top_k: { label: "Top-k", min: -1, step: 1 },
  min_p: { label: "Min-p", min: 0, max: 1, step: "any" },
  max_tokens: { label: "Max tokens", min: 1, step: 1 },
  seed: { label: "Seed", step: 1 },
  repetition_penalty: { label: "Repetition penalty", min: 0.01, max: 10, step: "any" },
  presence_penalty: { label: "Presence penalty", min: -2, max: 2, step: "any" },
  frequency_penalty: { label: "Frequency penalty", min: -2, max: 2, step: "any" },
};

const DEFAULTS = "pagoda-settings";

export function defaultSettings() {
  try {
    const entries = Object.entries(JSON.parse(inBrowser.get(DEFAULTS) || "{}"));
    return Object.fromEntries(entries.filter(([, value]) => typeof value === "string"));
  } catch {
    return {};
  }
}

// The request's fields for a conversation's settings.
export function samplingOf(settings) {
  const fields = {};
  for (const name of Object.keys(NUMBERS)) {
    const value = Number(settings[name]);
    if (settings[name] && Number.isFinite(value)) fields[name] = value;
  }
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops.map((stop) => stop.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  return { ...fields, ...extraOf(settings.extra) };
}

function extraOf(text) {
  if (!text?.trim()) return {};
  const value = JSON.parse(text);
  if (!value || typeof value !== "object" || Array.isArray(value)) throw new Error("It has to be a JSON object.");
  return value;
}

function fieldset(legend, ...children) {
  return h("fieldset", {}, h("legend", {}, legend), ...children);
}

function field(name, label, control, note) {
  control.id = `set-${name}`;
  if (note) control.setAttribute("aria-describedby", `set-${name}-note`);
  return h(
    "div",
    { class: "field" },
    h("label", { for: control.id }, label),
    control,
    note ? h("p", { class: "hint", id: `set-${name}-note` }, note) : null,
  );
}

function themeChoice() {
  const now = inBrowser.get("pagoda-theme") || "auto";
  const choices = ["auto", "light", "dark"].map((name) => {
    const input = h("input", { type: "radio", name: "theme", value: name, checked: now === name });
    input.addEventListener("change", () => {
      inBrowser.set("pagoda-theme", name);
      globalThis.pagodaTheme(name);
    });
    return h("label", {}, input, name === "auto" ? "As the system" : name === "light" ? "Light" : "Dark");
  });
  return h("div", { class: "choice", role: "radiogroup", "aria-label": "Theme" }, ...choices);
}

// Opens the panel; `save` is called after each change with the conversation's settings.
export function openSettings({ conversation, model, save, exportThis, removeAll }) {
  const dialog = $("settings");
  const settings = conversation.settings;
  const set = (name, value) => {
    if (value) settings[name] = value;
    else delete settings[name];
    save();
  };

  const numbers = Object.entries(NUMBERS).map(([name, { label, ...bounds }]) => {
    const given = model.default_sampling_params?.[name];
    const input = h("input", { type: "number", inputmode: "decimal", placeholder: given ?? "default", ...bounds });
    input.value = settings[name] ?? "";
    input.addEventListener("change", () => {
      const wrong = !input.checkValidity();
      input.setAttribute("aria-invalid", wrong);
      if (wrong) input.reportValidity();
      else set(name, input.value);
    });
    return field(name, label, input);
  });

  const area = (name, label, rows, note, check) => {
    const control = h("textarea", { rows, spellcheck: "false" });
    control.value = settings[name] ?? "";
    control.addEventListener("change", () => {
      let wrong = "";
      try {
        check?.(control.value);
      } catch (error) {
        wrong = `This is not taken over: ${error.message}`;
      }
      control.setCustomValidity(wrong);
      control.setAttribute("aria-invalid", wrong !== "");
      if (wrong) control.reportValidity();
      else set(name, control.value);
    });
    return field(name, label, control, note);
  };

  const asDefault = button("Use for new conversations", () => {
    inBrowser.set(DEFAULTS, JSON.stringify(settings));
    asDefault.textContent = "Kept for new conversations";
  });
  const forget = button("Forget the key", () => {
    storedKey.set("");
    forget.disabled = true;
  });
  forget.disabled = !storedKey.get();
  const sure = () => {
    dialog.close();
    removeAll();
  };
  const removal = button("Delete all conversations", () => removal.replaceWith(button("Press again to delete all", sure, "danger")), "danger");

  dialog.replaceChildren(
    h(
      "div",
      { class: "row head" },
      h("h2", {}, "Settings"),
      iconButton("close", "Close settings", () => dialog.close(), { autofocus: true }),
    ),
    h(
      "div",
      { class: "panel" },
      fieldset("Theme", themeChoice()),
      fieldset(
        "This conversation",
        conversation.mode === "chat" ? area("system", "System prompt", 5) : "",
        h("div", { class: "numbers" }, ...numbers),
        area("stop", "Stop at", 2, "One text a line; \\n is a line break."),
        area("extra", "More request fields", 3, 'JSON, such as {"chat_template_kwargs": {"enable_thinking": false}}', extraOf),
        h("div", { class: "row" }, asDefault),
      ),
      fieldset(
        "Data",
        h("p", { class: "hint" }, "Conversations are kept in this browser only."),
        h("div", { class: "row" }, button("Export this one", exportThis), forget),
        h("div", { class: "row" }, removal),
      ),
    ),
  );
  dialog.showModal();
}
