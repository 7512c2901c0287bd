// What the page remembers. Settings and theme outlive the tab; the conversation and the key do not.
// A browser that forbids storage forgets everything, and the page works all the same.

function read(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(`flashdraft.${name}`));
  } catch {
    return null;
  }
}

function write(storage, name, value) {
  try {
    if (value === null) window[storage].removeItem(`flashdraft.${name}`);
    else window[storage].setItem(`flashdraft.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false; // full or forbidden
  }
}

export const lasting = {
  read: (name) => read("localStorage", name),
  write: (name, value) => write("localStorage", name, value),
};
export const ofThisTab = {
  read: (name) => read("sessionStorage", name),
  write: (name, value) => write("sessionStorage", name, value),
};

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

export class Settings {
  constructor(form, thinking) {
    this.form = form;
    this.thinking = thinking;
    this.fill(lasting.read("settings") ?? {});
    form.addEventListener("input", () => this.save());
    thinking.addEventListener("change", () => this.save());
  }

  fill(saved) {
    for (const name of ["system", ...NUMBERS]) this.form.elements[name].value = saved[name] ?? "";
    this.thinking.value = saved.thinking ?? "";
  }

  save() {
    const values = { thinking: this.thinking.value };
    for (const name of ["system", ...NUMBERS]) values[name] = this.form.elements[name].value;
    lasting.write("settings", values);
  }

  // An empty field shows what the server takes for it.
  suggest(defaults) {
    for (const name of NUMBERS) {
      if (name !== "seed") this.form.elements[name].placeholder = defaults[name] ?? "default";
    }
  }

  reset() {
    this.fill({});
    this.save();
  }

  get system() {
    return this.form.elements.system.value.trim();
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
    if (!this.thinking.value) return {};
    return { chat_template_kwargs: { enable_thinking: this.thinking.value === "on" } };
  }
}

export class Theme {
  constructor(button) {
    this.button = button;
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.system.addEventListener("change", () => this.show());
    button.addEventListener("click", () => this.toggle());
    this.show();
  }

  get isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : this.system.matches;
  }

  toggle() {
    const theme = this.isDark ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("flashdraft.theme", theme); // read bare, before the modules load
    } catch {
      // forbidden: the choice holds until the page is left
    }
    this.show();
  }

  show() {
    this.button.textContent = this.isDark ? "Light" : "Dark";
    this.button.setAttribute("aria-label", `Use the ${this.isDark ? "light" : "dark"} theme`);
  }
}
