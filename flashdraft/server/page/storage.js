// What the page remembers in few words: settings and theme outlive the tab, the key does not.
// Conversations are kept in chats/records.js.
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
  // calls `use` with what another tab has written
  hear: (name, use) =>
    window.addEventListener("storage", (event) => {
      if (event.key === `flashdraft.${name}`) use(read("localStorage", name));
    }),
};
export const ofThisTab = {
  read: (name) => read("sessionStorage", name),
  write: (name, value) => write("sessionStorage", name, value),
};

export class Theme {
  constructor(button) {
    this.button = button;
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.system.addEventListener("change", () => this.show());
    button.addEventListener("click", () => this.toggle());
    window.addEventListener("storage", ({ key, newValue }) => {
      if (key !== "flashdraft.theme" || !["light", "dark"].includes(newValue)) return;
      document.documentElement.dataset.theme = newValue;
      this.show();
    });
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
