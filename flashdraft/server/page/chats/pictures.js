// Pictures, PDFs and films that go with a question: read as data: URLs, large pictures made smaller
// first. What is shown are these alone: no answer and no imported file can name one elsewhere.

import { element } from "../dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // as the server reads them
const MAX_BYTES = 20 * 1024 * 1024; // of a file
const AS_THEY_ARE = 1024 * 1024; // bytes; larger ones are made smaller
const MAX_SIDE = 2048; // pixels: more than a model looks at
const QUALITY = 0.92;
const ADDRESS =
  /^data:(?:image\/(?:png|jpeg|webp|gif)|application\/pdf|video\/[\w.+-]+);base64,[A-Za-z0-9+/]+={0,2}$/;

export const MAX_PICTURES = 16; // of a question; a conversation is sent whole, and the server counts
export const isPictureAddress = (value) => typeof value === "string" && ADDRESS.test(value);

// What the model must be able to, so that a file can go as a picture.
export function kindOf({ type }) {
  if (type === "application/pdf") return "pdf";
  if (type.startsWith("video/")) return "video";
  return type.startsWith("image/") && type !== "image/svg+xml" && "vision";
}

// The data: URL of such a file. Throws words.
export async function readPicture(file, name) {
  if (file.size > MAX_BYTES) throw new Error(`“${name}” has more than 20 MB; choose a smaller one.`);
  try {
    let sent = file;
    if (kindOf(file) === "vision") {
      const image = await createImageBitmap(file); // upright; throws where it is no picture
      if (!KINDS.includes(file.type) || file.size > AS_THEY_ARE) sent = await smaller(image);
      image.close();
    }
    const address = await addressOf(sent);
    if (isPictureAddress(address)) return address;
  } catch {
    // told below
  }
  throw new Error(`“${name}” cannot be read as a picture; attach a PNG, JPEG, WebP or GIF file.`);
}

async function smaller(image) {
  const factor = Math.min(1, MAX_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * factor));
  canvas.height = Math.max(1, Math.round(image.height * factor));
  const drawing = canvas.getContext("2d");
  drawing.fillStyle = "#fff"; // behind what is transparent: JPEG has black there
  drawing.fillRect(0, 0, canvas.width, canvas.height);
  drawing.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
}

const addressOf = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });

export function thumbnail({ name, picture }) {
  if (!picture.startsWith("data:image")) return element("p", "size", name);
  const image = document.createElement("img");
  image.className = "picture";
  image.alt = name;
  image.src = picture;
  return image;
}

// The content of a question: its pictures first, as models are taught.
export function contentOf(text, files) {
  const pictures = files.filter((file) => file.picture);
  if (!pictures.length) return text;
  const shown = pictures.map(({ name, picture: url }) => {
    if (url.startsWith("data:app")) return { type: "file", file: { filename: name, file_data: url } };
    const type = url.startsWith("data:video") ? "video_url" : "image_url";
    return { type, [type]: { url } };
  });
  return text ? [...shown, { type: "text", text }] : shown;
}
