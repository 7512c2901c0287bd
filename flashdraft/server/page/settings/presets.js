// Settings by name: three of ours, and those that the user saves.

import { element } from "../dom.js";
import { lasting } from "../storage.js";

const OURS = [
  { name: "The model's own", values: {} },
  { name: "Precise", values: { temperature: "0" } },
  { name: "Balanced", values: { temperature: "0.7", top_p: "0.9" } },
  { name: "Creative", values: { temperature: "1", min_p: "0.05" } },
];
const MAX_SAVED = 50;

export class Presets {
  constructor({ page, settings }) {
    Object.assign(this, { page, settings });
    this.take(lasting.read("presets"));
    page.preset.addEventListener("change", () => this.use());
    page.savePreset.addEventListener("click", () => this.save());
    page.removePreset.addEventListener("click", () => this.remove());
    page.presetName.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // the form would end
      this.save();
    });
    settings.form.addEventListener("input", ({ target }) => {
      if (target.name) this.show(""); // the values are nobody's any more
    });
    lasting.hear("presets", (saved) => {
      this.take(saved);
      this.draw();
    });
    this.draw();
  }

  take(saved) {
    this.saved = Array.isArray(saved) ? saved.filter((one) => typeof one?.name === "string") : [];
  }

  draw() {
    const option = ({ name }, kind, i) => {
      const made = element("option", "", name);
      made.value = `${kind} ${i}`;
      return made;
    };
    const none = element("option", "", "none");
    none.value = "";
    const group = (label, presets, kind) => {
      const made = element("optgroup", "", ...presets.map((one, i) => option(one, kind, i)));
      made.label = label;
      return made;
    };
    const groups = [group("Ready made", OURS, "ours")];
    if (this.saved.length) groups.push(group("Yours", this.saved, "saved"));
    this.page.preset.replaceChildren(none, ...groups);
    this.show("");
  }

  show(value) {
    this.page.preset.value = value;
    this.page.removePreset.hidden = !value.startsWith("saved");
  }

  use() {
    const { value } = this.page.preset;
    const [kind, i] = value.split(" ");
    const preset = (kind === "ours" ? OURS : this.saved)[i];
    this.show(value);
    if (!preset) return;
    // ours say how to sample, and leave the rest
    const kept = kind === "ours" ? pick(this.settings.read(), ["system", "thinking", "max_tokens", "seed"]) : {};
    this.settings.fill({ ...kept, ...preset.values });
    this.settings.save();
  }

  save() {
    const name = this.page.presetName.value.trim().slice(0, 60);
    if (!name) {
      this.page.presetName.focus();
      return;
    }
    this.saved = this.saved.filter((one) => one.name !== name).slice(0, MAX_SAVED - 1);
    this.saved.push({ name, values: this.settings.read() });
    lasting.write("presets", this.saved);
    this.page.presetName.value = "";
    this.draw();
    this.show(`saved ${this.saved.length - 1}`);
  }

  remove() {
    const [, i] = this.page.preset.value.split(" ");
    this.saved.splice(Number(i), 1);
    lasting.write("presets", this.saved);
    this.draw();
    this.page.preset.focus();
  }
}

function pick(values, names) {
  return Object.fromEntries(names.map((name) => [name, values[name]]));
}
