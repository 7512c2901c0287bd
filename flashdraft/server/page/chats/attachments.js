// Text files and pictures that go with the next question: picked, dropped or pasted. The texts' room
// is the context's.

import { button, element } from "../dom.js";
import { kindOf, MAX_PICTURES, readPicture, thumbnail } from "./pictures.js";

const CHARACTERS_A_TOKEN = 4; // what a token holds at most, as a rule
const MAX_BYTES = 4 * 1024 * 1024; // of one file, before anybody knows the context
const MAX_FILES = 20;
const MAX_NAME = 120;

export class Attachments {
  constructor({ page, server, say }) {
    Object.assign(this, { page, server, say });
    this.files = []; // { name, text } or { name, picture: a data: URL }
    page.attach.addEventListener("click", () => page.filePicker.click());
    page.filePicker.addEventListener("change", () => {
      this.add([...page.filePicker.files]);
      page.filePicker.value = "";
    });
    page.attachImage.addEventListener("click", () => page.imagePicker.click());
    page.imagePicker.addEventListener("change", () => {
      this.add([...page.imagePicker.files]);
      page.imagePicker.value = "";
    });
    server.addEventListener("change", () => this.offer());
    page.question.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    this.takeDrops(page.composer);
    this.takeDrops(page.chat);
  }

  takeDrops(place) {
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    for (const name of ["dragenter", "dragover"]) {
      place.addEventListener(name, (event) => {
        if (!holdsFiles(event)) return;
        event.preventDefault();
        this.page.composer.classList.add("dropping");
      });
    }
    for (const name of ["dragleave", "drop"]) {
      place.addEventListener(name, () => this.page.composer.classList.remove("dropping"));
    }
    place.addEventListener("drop", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  // Pictures are for models that see them.
  offer() {
    const { canSee } = this.server;
    this.page.attachImage.disabled = !canSee;
    this.page.attachImage.title = canSee ? "Pictures; dropping and pasting them works too" : "This model takes no pictures";
  }

  get room() {
    return (this.server.context ?? Infinity) * CHARACTERS_A_TOKEN;
  }

  async add(files) {
    const refusals = [];
    for (const file of files) {
      try {
        this.files.push(await this.read(file));
      } catch (error) {
        refusals.push(error.message);
      }
      this.draw();
    }
    this.page.attachNote.textContent = refusals.join(" ");
    this.page.attachNote.hidden = !refusals.length;
    this.page.question.focus();
  }

  async read(file) {
    const name = (file.name || "pasted.txt").slice(0, MAX_NAME);
    if (this.files.length >= MAX_FILES) throw new Error(`“${name}” is one file too many; ${MAX_FILES} at most.`);
    const kind = kindOf(file);
    if (kind) {
      if (!this.server.able.includes(kind)) {
        const noun = { pdf: "PDF", video: "film" }[kind] ?? "picture";
        throw new Error(`“${name}” is a ${noun}, and this model takes none.`);
      }
      if (this.files.filter((one) => one.picture).length >= MAX_PICTURES) {
        throw new Error(`“${name}” is one picture too many; ${MAX_PICTURES} at most.`);
      }
      return { name, picture: await readPicture(file, name) };
    }
    if (file.size > MAX_BYTES) {
      throw new Error(`“${name}” has ${sizeOf(file.size)}; ${sizeOf(MAX_BYTES)} at most. Cut out the part that matters.`);
    }
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      throw new Error(`“${name}” is no text in UTF-8; attach a text file.`);
    }
    if (text.includes("\0")) throw new Error(`“${name}” is no text; attach a text file.`);
    const taken = this.files.reduce((sum, one) => sum + (one.text ?? "").length, 0);
    if (taken + text.length > this.room) {
      throw new Error(
        `“${name}” has ${text.length.toLocaleString("en")} characters; the model's context of ` +
          `${this.server.context.toLocaleString("en")} tokens cannot hold that. Cut out the part that matters.`,
      );
    }
    return { name, text };
  }

  set(files) {
    this.files = [...files];
    this.page.attachNote.hidden = true;
    this.draw();
  }

  take() {
    const { files } = this;
    this.set([]);
    return files;
  }

  draw() {
    this.page.attached.replaceChildren(
      ...this.files.map((file) => {
        const remove = button("×", () => {
          this.files = this.files.filter((one) => one !== file);
          this.draw();
          this.page.question.focus();
        });
        remove.setAttribute("aria-label", `Remove ${file.name}`);
        const shown = file.picture ? [thumbnail(file)] : [file.name, element("span", "size", ` ${sizeOf(file.text.length)}`)];
        return element("li", "", ...shown, remove);
      }),
    );
    this.page.attached.hidden = !this.files.length;
  }
}

export function sizeOf(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  return bytes < 1024 * 1024 ? `${(bytes / 1024).toFixed(1)} kB` : `${(bytes / 1024 / 1024).toFixed(1)} MB`;
}
