// What is asked with every question: sampling, system prompt, thinking. The form shows the values that
// hold where it says nothing; opened for one answer, it changes that answer only.

import { lasting } from "../storage.js";

export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const OFF = { top_p: "1", top_k: "off", min_p: "off", seed: "random" }; // where the server says nothing

export class Settings {
  constructor({ page, server }) {
    Object.assign(this, { page, server, dialog: page.settings });
    this.form = page.settings.querySelector("form");
    this.once = null; // what becomes of the fields, while the form is open for one answer
    this.values = lasting.read("settings") ?? {};
    this.canThink = false;
    this.fill(this.values);
    this.form.addEventListener("input", () => this.save());
    this.form.addEventListener("submit", () => this.end());
    this.dialog.addEventListener("close", () => this.forget());
    page.thinking.addEventListener("change", () => this.save());
    lasting.hear("settings", (values) => this.take(values)); // from another tab
    page.resetSettings.addEventListener("click", () => this.reset());
    page.cancelOnce.addEventListener("click", () => this.dialog.close());
  }

  fill(values) {
    for (const name of ["system", ...NUMBERS]) {
      const value = values[name];
      this.form.elements[name].value = typeof value === "string" || typeof value === "number" ? value : "";
    }
    this.page.thinking.value = ["on", "off"].includes(values.thinking) ? values.thinking : "";
  }

  reset() {
    this.fill({});
    this.save();
  }

  // As they stand in the form, in words.
  read() {
    const values = { thinking: this.page.thinking.value };
    for (const name of ["system", ...NUMBERS]) values[name] = this.form.elements[name].value;
    return values;
  }

  save() {
    if (this.once) return;
    this.values = this.read();
    lasting.write("settings", this.values);
  }

  take(values) {
    this.values = values ?? {};
    if (!this.once) this.fill(this.values);
  }

  // -- what the server takes ---------------------------------------------------------------------

  suggest({ model, defaults, context, canThink }) {
    for (const name of NUMBERS) {
      this.form.elements[name].placeholder = defaults[name] ?? OFF[name] ?? "default";
    }
    const number = (value) => value.toLocaleString("en");
    const facts = [
      model,
      context && `a context of ${number(context)} tokens`,
      defaults.max_tokens && `answers of at most ${number(defaults.max_tokens)} tokens`,
    ];
    this.page.modelFacts.textContent = facts.filter(Boolean).join(", ");
    if (context) this.form.elements.max_tokens.max = context;
    this.canThink = canThink;
    this.page.thinkingChoice.hidden = !canThink;
  }

  get system() {
    return (this.values.system ?? "").trim();
  }

  // The fields of a request; what is empty or out of bounds stays the model's own choice.
  get sampling() {
    const fields = {};
    for (const name of NUMBERS) {
      const input = this.form.elements[name];
      if (input.value !== "" && input.validity.valid) fields[name] = input.valueAsNumber;
    }
    return { ...fields, ...this.template };
  }

  get template() {
    const chosen = this.page.thinking.value;
    return this.canThink && chosen ? { chat_template_kwargs: { enable_thinking: chosen === "on" } } : {};
  }

  // -- the dialog --------------------------------------------------------------------------------

  open() {
    this.showFor(null);
  }

  // For one answer: `use` gets its fields, and the settings stay as they are.
  askOnce(use) {
    this.showFor(use);
  }

  showFor(use) {
    this.once = use;
    const { page } = this;
    page.settingsTitle.textContent = use ? "Answer again with" : "Settings";
    page.applySettings.textContent = use ? "Answer again" : "Done";
    page.cancelOnce.hidden = !use;
    page.systemField.hidden = use !== null;
    this.dialog.showModal();
  }

  end() {
    if (!this.once) return;
    const [use, fields] = [this.once, this.sampling];
    this.forget();
    use(fields);
  }

  // The form is the settings' again.
  forget() {
    if (!this.once) return;
    this.once = null;
    this.fill(this.values);
  }
}
